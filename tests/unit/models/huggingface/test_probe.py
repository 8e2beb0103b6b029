"""What the look finds in a model, and that it is quick where the model is large."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.huggingface.args import HuggingFaceArgs, args_from_config
from models.huggingface.hub import settings
from models.huggingface.probe import FIXED
from models.llama import FLAVORS
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, REFUSED, SIZES, WINDOW
from tests.support.huggingface_full_size import PUBLISHED
from torchtitan_cp.metrics.throughput import flops_per_token, layer_costs
from torchtitan_cp.planner.parameters import count_parameters, total_parameters

LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
WHISPER = dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), 1) | {"pad_token_id": 0}


def tiny(family: str, **overrides: Any) -> HuggingFaceArgs:
    return args_from_config(FAMILIES[family], overrides)


def test_windows_and_the_frequencies_of_each_layer_are_found() -> None:
    args = tiny("Gemma 3")
    local, full = args.probe.layers
    assert (local.window, full.window) == (WINDOW, 0) == args.layer_windows
    assert local.rotary == "model.rotary_emb.sliding_attention_inv_freq"
    assert full.rotary == "model.rotary_emb.full_attention_inv_freq"
    assert (local.name, local.attention) == ("model.layers.0", "model.layers.0.self_attn")
    assert local.scale == pytest.approx(24**-0.5)  # query_pre_attn_scalar
    assert args.rotary_dim == 16


def test_sinks_experts_and_routers_are_found() -> None:
    args = tiny("gpt-oss")
    assert all(layer.sinks for layer in args.probe.layers)
    assert args.experts_per_token == 2
    assert args.probe.routers == ("model.layers.0.mlp.router", "model.layers.1.mlp.router")
    layer = args.probe.layers[0]
    experts = 6 * 3 * 48 * 64
    assert layer.matrices - layer.active_matrices == experts * 4 // 6
    assert layer.active_mlp_matrices == experts * 2 // 6 + 6 * 48


def test_values_narrower_than_keys_and_a_scale_that_follows_yarn_are_found() -> None:
    args = tiny("DeepSeek-V3")
    layer = args.probe.layers[0]
    assert (layer.qk_dim, layer.v_dim, args.head_dim) == (24, 12, 18)
    assert args.probe.scale_follows_rope
    # Its own YaRN is in that scale, and the config of an export would not have it.
    assert "an export would lose" in str(args.rope_problem("linear"))
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert "scale its attention scores" in str(tiny("DeepSeek-V3", **plain).rope_problem("yarn"))
    assert tiny("DeepSeek-V3", **plain).rope_problem("linear") is None
    assert not tiny("Gemma 3").probe.scale_follows_rope


def test_fewer_layers_shorten_what_has_a_value_for_each_layer() -> None:
    config = {**FAMILIES["Gemma 3"], "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert args_from_config(config, {"num_hidden_layers": 3}).layer_windows == (WINDOW, 0, WINDOW)


def test_a_tokenizers_vocabulary_has_no_padding_of_the_configs() -> None:
    config = {**FAMILIES["Phi-3"], "vocab_size": 40_000, "pad_token_id": 32_000}
    args = args_from_config(config, {"vocab_size": 0})
    assert replace(args, vocab_size=260).probe.vocab_size == 260
    assert settings(replace(args, vocab_size=260))["pad_token_id"] is None
    assert settings(args_from_config(config, {}))["pad_token_id"] == 32_000


def test_soft_caps_and_the_factor_of_the_logits_are_found() -> None:
    assert [layer.softcap for layer in tiny("Gemma 2").probe.layers] == [5.0, 5.0]
    assert tiny("Gemma 2").logit_softcap == pytest.approx(3.0)
    assert tiny("Granite").logit_scale == pytest.approx(1 / 4.0)


def test_layers_without_rotary_embedding_and_models_with_learned_positions_are_found() -> None:
    assert [bool(layer.rotary) for layer in tiny("SmolLM3").probe.layers] == [True, False]
    zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    args = args_from_config({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "vocab_size": 288}, zero)
    assert args.probe.learned_positions
    assert {layer.rotary for layer in args.probe.layers} == {FIXED}
    assert "no rotary embedding" in str(args.rope_problem("none"))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (FAMILIES["GPT-2"], 512),
        (REFUSED["OPT"] | {"dropout": 0.0}, 512),  # of a table with two rows more
        ({"model_type": "whisper", "d_model": 48, "vocab_size": 288, "max_target_positions": 100} | WHISPER, 100),
        (FAMILIES["Llama"], 0),
    ],
)
def test_the_longest_sequence_is_that_of_the_table_of_positions(config: dict[str, Any], longest: int) -> None:
    assert args_from_config(config, {}).longest == longest


@pytest.mark.parametrize(
    ("family", "overrides", "dims"),
    [
        ("Cohere 2", {}, 0),
        ("Gemma 3", {"layer_types": ["sliding_attention"] * 2}, 0),
        ("Mistral", {}, 16),
        ("SmolLM3", {"layer_types": ["full_attention"] * 2}, 12),
    ],
)
def test_a_stage_has_a_rope_where_it_turns_layers_of_full_attention_or_the_one_rotary_of_windows(
    family: str, overrides: dict[str, Any], dims: int
) -> None:
    args = tiny(family, **overrides)
    assert args.rotary_dim == dims
    assert ("no rotary embedding in its layers of full attention" in str(args.rope_problem("none"))) == (not dims)


@pytest.mark.parametrize(("flavor", "config"), [("8B", LLAMA3_8B), ("qwen3-0.6B", QWEN3_06B)])
def test_counts_and_costs_are_those_of_the_native_architecture(flavor: str, config: dict[str, Any]) -> None:
    theirs, ours = args_from_config(config, {"num_hidden_layers": 2}), replace(FLAVORS[flavor], n_layers=2)
    assert count_parameters(theirs) == count_parameters(ours)
    assert total_parameters(theirs) == total_parameters(ours) == theirs.probe.parameters
    assert flops_per_token(theirs, 4096) == flops_per_token(ours, 4096)
    assert layer_costs(theirs, 4096) == layer_costs(ours, 4096)
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "active_ffn_dim", "rotary_dim"):
        assert getattr(theirs, name) == getattr(ours, name), name


@pytest.mark.parametrize(
    ("config", "overrides", "says"),
    [
        ({"model_type": "mine"}, {}, "'mine', which transformers does not have"),
        ({"model_type": "llama"}, {"hidden": 1}, "LlamaConfig has no 'hidden'; did you mean 'hidden_act'"),
        ({"model_type": "llama"}, {"xyz": 1}, "LlamaConfig has no 'xyz'; it has .*, vocab_size"),
        ({"model_type": "llama"}, {"hidden_size": 50}, "refuses this config of 'llama'"),
        ({"model_type": "t5"}, {}, "no causal language model of type 't5'"),
        ({"model_type": "llama"}, {"num_hidden_layers": 0}, "LlamaForCausalLM has .* no list of its 0 layers"),
        (FAMILIES["JetMoE"], {"output_router_logits": True}, "the balance loss of JetMoeForCausalLM is not supported"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(config: dict[str, Any], overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        args_from_config(config, overrides)


def test_a_multimodal_config_gives_its_text_model_with_overrides() -> None:
    text = {key: value for key, value in FAMILIES["Gemma 3"].items() if key != "model_type"}
    args = args_from_config({"model_type": "gemma3", "text_config": text}, {"vocab_size": 0})
    assert args.config["model_type"] == "gemma3_text"
    assert (args.vocab_size, args.probe.vocab_size) == (0, 288)
    assert args == HuggingFaceArgs(json.loads(json.dumps(args.config)), 0)


def test_a_multimodal_config_keeps_what_it_has_for_its_text_model() -> None:
    """Voxtral has a head_dim of 128 where its text model alone would divide hidden_size; Fuyu has the sizes flat."""
    sizes = {key: FAMILIES["Llama"][key] for key in SIZES}
    voxtral = {"model_type": "voxtral", "text_config": sizes}
    assert args_from_config(voxtral, {}).head_dim == 128
    assert args_from_config(voxtral, {"head_dim": 16}).head_dim == 16
    assert args_from_config({"model_type": "voxtral"}, {}).config["head_dim"] == 128
    fuyu = args_from_config({"model_type": "fuyu", **sizes}, {"num_hidden_layers": 3})
    assert (fuyu.probe.dim, fuyu.n_layers) == (sizes["hidden_size"], 3)


@pytest.mark.parametrize(
    ("kind", "family", "beside", "tied"),
    [
        ("llava", "Llama", {"tie_word_embeddings": True}, True),
        ("llava", "Llama, tied", {"tie_word_embeddings": False}, True),  # transformers takes either for true
        ("cohere_compass", "Cohere Compass", {"tie_word_embeddings": False}, False),
        ("mistral3", "Mistral", {}, False),
    ],
)
def test_whether_embeddings_are_tied_may_stand_beside_the_text_config(
    kind: str, family: str, beside: dict[str, Any], tied: bool
) -> None:
    config = {"model_type": kind, "text_config": FAMILIES[family], **beside}
    assert args_from_config(config, {}).tie_embeddings == tied
    saved = CONFIG_MAPPING[kind].from_dict(dict(config))
    assert args_from_config(saved.to_dict(), {}).tie_embeddings == saved.tie_word_embeddings


LOOK = """
import json, re, sys, time
from pathlib import Path
from models.huggingface.args import args_from_config
config, begun = json.loads(sys.argv[1]), time.process_time()
args = args_from_config(config, {})
sizes = args.probe.parameters, args.linear_parameters()
# Of this program alone: ru_maxrss begins with that of the process that started it.
most = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(*sizes, time.process_time() - begun, most)
"""


@deep_rows("name", PUBLISHED, default=[])
def test_a_large_model_is_looked_at_in_10_seconds_and_4_gib(name: str) -> None:
    config, billions, billions_met = PUBLISHED[name]
    command = [sys.executable, "-c", LOOK, json.dumps(config)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parameters, met, seconds, kilobytes = map(float, out.split())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.006)
    assert met / 1e9 == pytest.approx(billions_met, rel=0.06)
    assert seconds < 10
    assert kilobytes / 2**20 < 4
