"""Files of weights in Hugging Face's format: read by name, refused if they are not whole."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.llama import Llama, LlamaArgs
from models.llama.hub import HUB
from tests.support.hub_models import save_model
from torchtitan_cp.checkpoint.hub import INDEX_FILE, load_parts, save_hub_weights
from torchtitan_cp.config import ConfigError

THIRD_NORM = "model.layers.2.post_attention_layernorm.weight"


def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, norm_eps=1e-6), lambda *_: torch.zeros(()))
    whole = load_file(tmp_path / "model.safetensors")
    names = [name for name, _ in model.named_parameters()]

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            load_parts(tmp_path, [model], names, HUB)
        return str(caught.value)

    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, tmp_path / "model.safetensors")
    assert "has no tensor model.norm.weight, which is our norm.weight" in problem()
    save_file({**whole, "model.layers.0.mlp.down_proj.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert "no place for: model.layers.0.mlp.down_proj.bias" in problem()
    # Qwen2 and Qwen3 have these, and another model has more layers.
    for other in ("0.self_attn.q_proj.bias", "0.self_attn.q_norm.weight", "4.input_layernorm.weight"):
        save_file({**whole, f"model.layers.{other}": torch.ones(48)}, tmp_path / "model.safetensors")
        assert f"no place for: model.layers.{other}" in problem()
    save_file({**whole, "model.norm.weight": torch.ones(48, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "is quantized: model.norm.weight is I8; save it in bfloat16 first" in problem()
    save_file({**whole, "model.norm.weight": torch.zeros(47)}, tmp_path / "model.safetensors")
    assert "model.norm.weight has the shape [47], and the model's is [48]" in problem()
    for index, says in (
        ({"weight_map": {"lm_head.weights": "model.safetensors"}}, "has no lm_head.weights in the file that its index"),
        ({"weight_map": {"lm_head.weight": None}}, "has an index that cannot be read: "),
        ({"weight_map": None}, "has an index that cannot be read: 'NoneType'"),
        ({"weight_map": [1]}, "has an index that cannot be read: 'list'"),
        ([1], "has an index that cannot be read: list indices"),
    ):
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
        assert says in problem()
        assert "fix: give a folder with config.json and complete" in problem()
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:5000])
    assert "model.safetensors cannot be read" in problem()
    (tmp_path / "model.safetensors").unlink()
    assert f"has neither model.safetensors nor {INDEX_FILE}" in problem()


def test_a_pipeline_stage_is_filled_from_the_whole_models_files(tmp_path: Path) -> None:
    save_model("llama, tied", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    tied = whole["model.embed_tokens.weight"].clone()
    more = {"lm_head.weight": tied, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file({**whole, **more}, tmp_path / "model.safetensors")
    model = Llama(LlamaArgs(48, 4, 4, 2, 12, 96, 288, tie_embeddings=True), lambda *_: torch.zeros(()))
    names = [name for name, _ in model.named_parameters()]
    load_parts(tmp_path, [model], names, HUB)
    save_file({**whole, **more, "lm_head.weight": tied + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"other values in lm_head.weight than in the weight that it is tied to\n"):
        load_parts(tmp_path, [model], names, HUB)
    model.keep_layers(1, 3)
    load_parts(tmp_path, [model], names, HUB)
    assert torch.equal(model.get_parameter("layers.2.ffn_norm.weight"), whole[THIRD_NORM])


def test_exported_files_may_be_read_by_those_who_may_read_the_folder(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        (tmp_path / "out").mkdir()
    finally:
        os.umask(old)
    save_hub_weights(tmp_path / "out", {"w": 4}, lambda names: dict.fromkeys(names, torch.ones(1)))
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o640
