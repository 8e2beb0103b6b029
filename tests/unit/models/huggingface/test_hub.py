"""Weights of every family go in and out as transformers saves them; files that do not fit are refused by name."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.huggingface import ARCHITECTURE, HUB
from models.huggingface.args import args_from_config, parse_config
from models.huggingface.hub import load_weights, settings, writer
from models.huggingface.init import Initializer, on_meta
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, eager_model
from torchtitan_cp.checkpoint.hub import load_parts, read_shard
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Model
from torchtitan_cp.training.registry import config_for_hub, register

CPU = torch.device("cpu")
# transformers itself does not read its embedding back: it draws the tied output again.
READ_BACK = [name for name in FAMILIES if name != "Youtu"]
# One tensor holds q, k and v, or all that enters a delta rule; we store them apart, which transformers reads too.
FUSED = ("Sarvam MoE", "Lara Mini")
DEFAULT = ("gpt-oss", "Gemma 4", "MiniMax-M2", "Apertus 1.5", "Sarvam MoE", "OLMo-Hybrid", "Nemotron-H")


def stored_in(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in slices(file).items()}


def slices(path: Path) -> dict[str, Any]:
    file = safe_open(path, framework="pt")
    names: list[str] = file.keys()
    return {name: file.get_slice(name) for name in names}


def empty_model(config: dict[str, Any]) -> Any:
    """Real memory and no weights."""
    described = parse_config(args_from_config(config, {}).sizes)
    model = on_meta(described).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    Initializer(described).restore_buffers(model, CPU)
    return model


@deep_rows("family", READ_BACK, default=[name for name in DEFAULT if name in READ_BACK])
def test_all_tensors_of_a_family_go_in_and_out_unchanged(tmp_path: Path, family: str) -> None:
    config, args = FAMILIES[family], args_from_config(FAMILIES[family], {})
    theirs = eager_model(config)
    state = theirs.state_dict()
    for name, buffer in theirs.named_buffers():
        if name in state and buffer.is_floating_point():
            buffer.uniform_(0.5, 0.6)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    ours = empty_model(config)
    load_weights(ours, stored_in(tmp_path / "in"), read_shard)
    for name, values in state.items():
        assert torch.equal(ours.state_dict()[name], values), name

    to_hub = writer(args)
    tensors: dict[str, Tensor] = {}
    for name, values in ours.state_dict().items():
        tensors |= {hub_name: x.clone() for hub_name, x in to_hub(name, values, torch.float32).items()}
    assert (tensors.keys() == stored_in(tmp_path / "in").keys()) == (family not in FUSED)
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    values = settings(args, 512) | {"dtype": "float32"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(values))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, buffer in back.state_dict().items():
        assert torch.equal(state[name], buffer), name


def edited(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> dict[str, Any]:
    """The tensors of a folder after a change."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "changed.safetensors")
    return slices(folder / "changed.safetensors")


EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda x: x.pop("model.norm.weight"), "lacks some of model.norm.weight of the model"),
    "an expert is missing": (lambda x: x.pop(EXPERT), "lacks some of model.layers.1.mlp.experts.gate_up_proj"),
    "a layer is missing": (
        lambda x: [x.pop(name) for name in list(x) if ".layers.1." in name],
        r"model.layers.1.self_attn.q_proj.weight, .* of the model \(11 such tensors\)",
    ),
    "another shape": (
        lambda x: x.update({"model.norm.weight": torch.zeros(47)}),
        r"has model.norm.weight of \[47\], and the model's model.norm.weight is \[48\]",
    ),
    "an expert of another shape": (
        lambda x: x.update({EXPERT: torch.zeros(25, 48)}),
        r"experts.4.up_proj.weight of \[25, 48\], and the model's .*gate_up_proj is \[6, 48, 48\]",
    ),
    "no place": (
        lambda x: x.update({"model.layers.0.mlp.gate.bias": torch.zeros(6)}),
        "has model.layers.0.mlp.gate.bias, which the model of 2 layers has no place for",
    ),
    "a layer too many": (
        lambda x: x.update(
            {name.replace(".1.", ".2.", 1): x[name].clone() for name in list(x) if ".layers.1." in name}
        ),
        "has model.layers.2.input_layernorm.weight, which the model of 2 layers has no place for",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    eager_model(FAMILIES["Qwen3-MoE"]).save_pretrained(tmp_path)
    stored = edited(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_weights(empty_model(FAMILIES["Qwen3-MoE"]), stored, read_shard)


@pytest.mark.skipif(FUSED[0] not in FAMILIES, reason="a later version of transformers has it")
def test_a_stored_tensor_with_more_rows_than_those_that_it_is_split_into_is_refused_by_name(tmp_path: Path) -> None:
    eager_model(FAMILIES[FUSED[0]]).save_pretrained(tmp_path)
    fused = "model.layers.1.attention.query_key_value.weight"
    stored = edited(tmp_path, lambda x: x.update({fused: torch.zeros(129, 48)}))
    with pytest.raises(ValueError, match=r"query_key_value.weight of \[129, 48\], and the model's .* is \[128, 48\]"):
        load_weights(empty_model(FAMILIES[FUSED[0]]), stored, read_shard)


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    eager_model(FAMILIES["Qwen3-MoE"]).save_pretrained(tmp_path)
    edited(tmp_path, lambda x: x.update({"lm_head.weight": x["lm_head.weight"].to(torch.float8_e4m3fn)}))
    (tmp_path / "changed.safetensors").rename(tmp_path / "model.safetensors")
    part = SimpleNamespace(causal=empty_model(FAMILIES["Qwen3-MoE"]))
    with pytest.raises(ConfigError, match=r"is quantized: lm_head.weight is F8_E4M3; save it in bfloat16 first"):
        load_parts(tmp_path, [part], (), HUB)  # type: ignore[list-item]


def test_a_tied_output_that_differs_is_refused_and_one_that_is_equal_is_taken(tmp_path: Path) -> None:
    config = FAMILIES["Llama, tied"]
    eager_model(config).save_pretrained(tmp_path)
    embedding = "model.embed_tokens.weight"
    load_weights(
        empty_model(config), edited(tmp_path, lambda x: x.update({"lm_head.weight": x[embedding].clone()})), read_shard
    )
    load_weights(
        empty_model(config), edited(tmp_path, lambda x: x.update({"lm_head.weight": x.pop(embedding)})), read_shard
    )
    with pytest.raises(ValueError, match=r"has other values in model.embed_tokens.weight than in the weight"):
        load_weights(
            empty_model(config), edited(tmp_path, lambda x: x.update({"lm_head.weight": x[embedding] + 1})), read_shard
        )


def test_heads_that_predict_further_tokens_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = FAMILIES["DeepSeek-V3"]
    eager_model(config).save_pretrained(tmp_path)
    more = {
        "model.layers.2.eh_proj.weight": torch.zeros(3),
        "model.layers.2.input_layernorm.weight": torch.zeros(3),
        "mtp.norm.weight": torch.zeros(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    with caplog.at_level(logging.WARNING):
        load_weights(empty_model(config), edited(tmp_path, lambda x: x.update(more)), read_shard)
    assert "not trained (3 tensors, as model.layers.2.eh_proj.weight): speculative decoding" in caplog.text
    assert "An export has them as they are in this checkpoint; to bring them back, train them on it" in caplog.text
    assert "does not use" not in caplog.text


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
WITH_IMAGES: dict[str, tuple[str, str, str]] = {
    "gemma3": ("Gemma 3", "Gemma3ForConditionalGeneration", "language_model"),
    "idefics2": ("Mistral", "Idefics2ForConditionalGeneration", "text_model"),
    "idefics3": ("Llama", "Idefics3ForConditionalGeneration", "text_model"),
    "smolvlm": ("Llama", "SmolVLMForConditionalGeneration", "text_model"),
}


@deep_rows("model_type", WITH_IMAGES, default=["idefics3"])
def test_the_text_part_of_a_model_with_images_is_taken(tmp_path: Path, model_type: str) -> None:
    family, name, part = WITH_IMAGES[model_type]
    described = AutoConfig.for_model(model_type, text_config=FAMILIES[family], vision_config=VISION)
    model = getattr(transformers, name)(described)
    model.save_pretrained(tmp_path)
    ours = empty_model(json.loads((tmp_path / "config.json").read_text()))
    load_parts(tmp_path, [SimpleNamespace(causal=ours)], (), HUB)  # type: ignore[list-item]
    theirs = getattr(model.model, part).state_dict()
    for name, values in ours.model.state_dict().items():
        assert torch.equal(values, theirs[name]), name


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 512}


def test_a_stage_changes_the_rotary_embedding_of_full_attention_alone() -> None:
    args = args_from_config(FAMILIES["Gemma 3"], {})
    config = settings(args, 4096, YARN)
    before = args.config["rope_parameters"]["sliding_attention"]
    assert config["rope_parameters"] == {"full_attention": YARN, "sliding_attention": before}
    assert config["max_position_embeddings"] == 4096
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert args.config["max_position_embeddings"] == 512
    partly = settings(args_from_config(FAMILIES["GLM-4"], {}), 4096, YARN)["rope_parameters"]
    assert partly == {**YARN, "partial_rotary_factor": 0.5}


def test_a_config_keeps_a_length_that_its_rotary_embedding_follows_and_refuses_what_it_cannot_say() -> None:
    phi = args_from_config(FAMILIES["Phi-3, longrope"], {})
    assert settings(phi, 4096, None)["max_position_embeddings"] == 512
    longer = settings(phi, 4096, {**phi.config["rope_parameters"], "original_max_position_embeddings": 512})
    assert (longer["max_position_embeddings"], longer["original_max_position_embeddings"]) == (4096, 512)
    with pytest.raises(ValueError, match="short_factor"):
        settings(phi, 4096, YARN)
    assert "by frequencies of the whole head" in str(args_from_config(FAMILIES["Gemma 4"], {}).rope_problem("none"))
    with pytest.raises(ValueError, match="a rotary embedding of type None, and a stage's is yarn"):
        settings(args_from_config(FAMILIES["GPT-2"], {}), 4096, YARN)


def test_a_stages_rope_that_an_export_cannot_say_is_refused_with_a_way_out() -> None:
    register([ARCHITECTURE])
    args = args_from_config(FAMILIES["Ministral 3"], {})
    with pytest.raises(ConfigError, match=r"from 64 on, so original_seq_len has to be that\n  fix: train one without"):
        config_for_hub(Model(architecture="huggingface"), args, 4096, Rope(1e6, "yarn", 8.0, original_seq_len=512))
