"""What the look finds in a model, and that it is quick where the model is large."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.modules import module as hooks_of_all_modules
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from models import ARCHITECTURES
from models.huggingface.args import HuggingFaceArgs, args_from_config, parse_config
from models.huggingface.attention import NAME, attention
from models.huggingface.model import HuggingFaceModel
from models.huggingface.observed_run import ObservedRun
from models.huggingface.probe import FIXED, probe_model
from models.llama import FLAVORS
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, REFUSED, WINDOW
from tests.support.huggingface_full_size import PUBLISHED
from torchtitan_cp.attention import make_plan
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.data.batches.micro_batches import BatchLayout
from torchtitan_cp.metrics.throughput import flops_per_token, layer_costs
from torchtitan_cp.parallel.blocks import wrap_blocks
from torchtitan_cp.planner.parameters import count_parameters, total_parameters
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.registry import register

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


def test_a_probe_leaves_a_model_that_trains_in_another_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, seen = ObservedRun._attend, list[Any]()

    def watched(run: ObservedRun, *arguments: Any, **options: Any) -> Any:
        hooks = hooks_of_all_modules._global_forward_hooks, hooks_of_all_modules._global_forward_pre_hooks
        seen.append((AttentionInterface._global_mapping[NAME], *map(len, hooks)))
        training = threading.Thread(target=torch.rand, args=(1,))
        training.start()
        training.join()
        return attend(run, *arguments, **options)

    monkeypatch.setattr(ObservedRun, "_attend", watched)
    probe_model(parse_config(FAMILIES["Qwen2"]))
    assert seen
    assert all(each == (attention, 0, 0) for each in seen)


def test_windows_and_the_frequencies_of_each_layer_are_found() -> None:
    args = tiny("Gemma 3")
    local, full = args.probe.layers
    assert [local.window, full.window] == [WINDOW, 0] == [mixer.window for mixer in args.mixers]
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
    assert layer.active_mlp_matrices == experts * 2 // 6 + 6 * 48  # a token meets two of six, and the router


@deep_rows("family", FAMILIES, default=["Llama", "Gemma 3", "OLMo 3"])
def test_the_product_that_a_recomputed_layer_does_not_run_again_is_found(family: str) -> None:
    """All products of the layers run again but that one, by torch's count."""
    args = tiny(family)
    model, totals = HuggingFaceModel(args, LayerAttention()), list[int]()
    model.reset_rope(32, torch.device("cpu"))
    windows = {0, *(mixer.window for mixer in args.mixers)}
    layout = BatchLayout(32, 1, 1, 1, 0, partial(make_plan), dict.fromkeys(windows, "ring"))
    counter, marks = FlopCounterMode(display=False), list[int]()  # FLOPs before and behind each layer
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: marks.append(counter.get_total_flops()))
        layer.register_forward_hook(lambda *_: marks.append(counter.get_total_flops()))
    for checkpoint in ("none", "full"):
        wrap_blocks(model, Activation(checkpoint=checkpoint), Compile(), "cpu")
        with counter:
            hidden = model(torch.arange(32)[None], torch.arange(32), layout.plans(None), lambda hidden, _: hidden)
            hidden.sum().backward()
            totals.append(counter.get_total_flops())
    of_layers = sum(marks[1 : 2 * args.n_layers : 2]) - sum(marks[: 2 * args.n_layers : 2])
    left_out = sum(model.get_parameter(f"{name}.weight").numel() for name in args.last_products if name)
    assert totals[1] - totals[0] == pytest.approx(of_layers - 2 * 32 * left_out, rel=1e-2)


def test_a_norm_behind_the_mlp_is_found() -> None:
    assert tiny("Llama").last_products == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert tiny("GPT-2").last_products == ("transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj")
    assert tiny("Gemma 3").last_products == tiny("OLMo 3").last_products == tiny("Mixtral").last_products == ("", "")


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
    register(ARCHITECTURES)
    their_model, our_model = Model("huggingface"), Model("llama")
    counts = count_parameters(our_model, ours)
    assert count_parameters(their_model, theirs) == replace(counts, fused_norms=False, qk_norm=False)
    assert total_parameters(their_model, theirs) == total_parameters(our_model, ours)
    assert flops_per_token(theirs, 4096) == flops_per_token(ours, 4096)
    assert layer_costs(theirs, 4096) == layer_costs(ours, 4096)
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "active_ffn_dim", "rotary_dim"):
        assert getattr(theirs, name) == getattr(ours, name), name


LOOK = """
import json, re, sys, time
from pathlib import Path
from models import ARCHITECTURES
from models.huggingface.args import args_from_config
from torchtitan_cp.config.sections import Model
from torchtitan_cp.planner.parameters import total_parameters
from torchtitan_cp.training.registry import register
config, begun = json.loads(sys.argv[1]), time.process_time()
args = args_from_config(config, {})
seconds = time.process_time() - begun
# Of this program alone: ru_maxrss begins with that of the process that started it.
most = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
register(ARCHITECTURES)
print(total_parameters(Model("huggingface"), args), args.linear_parameters(), seconds, most)
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
