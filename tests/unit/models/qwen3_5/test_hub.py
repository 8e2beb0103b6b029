"""Checkpoints of Qwen3.5, with a vision tower and without, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from models import ARCHITECTURES
from models.qwen3_5 import HybridArgs
from models.qwen3_5.hub import HUB, config, sizes
from tests.support.hybrid_model import ARGS, ROPE, build, names_of
from torchtitan_cp.checkpoint.hub import load_parts
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Model
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.registry import model_args_of, register


def test_a_checkpoint_that_sees_pictures_gives_its_text_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": ARGS.dim}
    text = config(ARGS) | {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
    whole = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    saved = Qwen3_5ForConditionalGeneration(whole)
    saved.save_pretrained(tmp_path)
    register(ARCHITECTURES)
    assert model_args_of(Model(architecture="qwen3_5", hub_checkpoint=str(tmp_path))) == ARGS
    model = build(ARGS, LayerAttention())
    load_parts(tmp_path, [model], names_of(model), HUB)
    theirs = {name.replace("language_model.", ""): p for name, p in saved.named_parameters()}
    for name, their_name in names_of(model).items():
        if name != "output.weight":
            assert torch.equal(model.get_parameter(name), theirs[their_name]), name


def test_what_this_block_is_not_is_refused(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    whole = config(ARGS)
    assert HybridArgs(**sizes(whole)) == ARGS
    kinds = ["full_attention", *["linear_attention"] * 3]
    for changed, why in (
        ({"layer_types": kinds}, "layer_types is not full attention in the last of every few layers"),
        ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next', and this architecture is qwen3_5"),
        ({"attention_bias": True}, "attention_bias is True, and these blocks have False"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | changed))
        with pytest.raises(ConfigError, match=why):
            model_args_of(Model(architecture="qwen3_5", config=str(tmp_path)))
    for size, why in (
        ({"linear_value_heads": 4}, "linear_value_heads = 4 is not a multiple of 3"),
        ({"n_layers": 3}, "n_layers = 3 leaves no layer of full attention"),
        ({"rotary_share": 0.1}, "is no even number of entries"),
        ({"windows": (5,)}, "no windows, biases or sinks"),
        ({"conv_width": 0}, "every size of the gated delta net"),
    ):
        assert why in (dataclasses.replace(ARGS, **size).problem() or ""), size
