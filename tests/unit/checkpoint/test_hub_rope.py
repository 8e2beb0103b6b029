"""Rotary embeddings in a config.json: written and read as transformers does, or refused."""

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchtitan_cp.checkpoint.hub_rope import fill_rope, hub_rope, rope_parameters
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.curriculum import rope_frequencies

ROPES = {
    "ntk is another theta": (
        Rope(theta=1e4, kind="ntk", factor=4.0),
        {"rope_type": "default", "rope_theta": 1e4 * 4.0 ** (64 / 62)},
    ),
    "linear": (Rope(kind="linear", factor=4.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "yarn without truncation": (
        Rope(kind="yarn", factor=4.0, original_seq_len=64, truncate=False),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "longrope with one list": (
        Rope(kind="longrope", factor=4.0, original_seq_len=64, long_factor=(2.0, 3.0)),
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "long_factor": [2.0, 3.0],
            "short_factor": [2.0, 3.0],
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_scaling_is_written_with_their_keys(name: str) -> None:
    rope, want = ROPES[name]
    assert rope_parameters(rope, 64) == want


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope()),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
            Rope(theta=1e6, kind="yarn", factor=4.0, original_seq_len=32768),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0, "attention_factor": None}},
            Rope(kind="linear", factor=8.0),
        ),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 5e5}}}, Rope()),
    ],
)
def test_a_rope_is_read_as_any_version_of_transformers_wrote_it(keys: dict[str, Any], rope: Rope) -> None:
    assert hub_rope(keys) == rope


def test_a_rope_that_no_stage_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"type 'dynamic'\n  fix: give each stage a rope of its own"):
        hub_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize(
    "keys",
    [{"rope_scaling": "x"}, {"rope_parameters": [1]}, {"text_config": 3}, {"max_position_embeddings": "long"}],
)
def test_a_rope_of_the_wrong_type_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"embedding that cannot be read: .*\n  fix: give each stage a rope"):
        hub_rope(keys)


def test_a_rope_inside_a_text_config_is_scaled_from_the_length_beside_it() -> None:
    scaling = {"type": "longrope", "long_factor": [2.0, 4.0]}
    text = {"rope_scaling": scaling, "max_position_embeddings": 8192, "original_max_position_embeddings": 4096}
    rope = hub_rope({"text_config": text})
    assert (rope.original_seq_len, rope.factor) == (4096, 2.0)


@pytest.mark.parametrize(
    ("config", "original"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "linear", "factor": 4.0}}, 0),
        ({}, 0),
    ],
)
def test_the_length_before_scaling_is_that_of_a_model_without_scaling(config: dict[str, Any], original: int) -> None:
    rope = build(Rope, {"kind": "yarn", "factor": 4.0}, where="rope", file="")
    assert fill_rope(rope, config).original_seq_len == original
    rope = build(Rope, {"kind": "yarn", "factor": 4.0, "original_seq_len": 512}, where="rope", file="")
    assert fill_rope(rope, config).original_seq_len == 512


LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.4}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "mscale": 0.7}),
        ("yarn", {"factor": 4.0, **MSCALE, "truncate": False}),
        ("yarn", {"factor": 4.0, **MSCALE, "attention_factor": 1.3}),
        ("longrope", LISTS),
        ("longrope", {**LISTS, "factor": 8.0}),
        ("longrope", {**LISTS, "attention_factor": 1.2}),
    ],
)
def test_a_rope_of_a_config_has_the_frequencies_and_factor_of_transformers(kind: str, keys: dict[str, Any]) -> None:
    original = "original_max_position_embeddings"
    for inside, beside, old in itertools.product(({}, {original: 512}), ({}, {original: 1024}), (False, True)):
        scaling = {"type" if old else "rope_type": kind, **keys, **inside}
        older, newer = {"rope_theta": 5e5, "rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": 5e5}}
        config = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, **beside}
        config |= older if old else newer
        ours, factor = rope_frequencies(hub_rope(config), 16, 4096)
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(config)))
        rotary(torch.zeros(1), torch.arange(4096)[None])  # longrope chooses its list by the largest position
        assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12), config
        # The bounds of test_rope: theirs are of fp32.
        assert ours == pytest.approx(rotary.inv_freq.tolist(), rel=1e-6, abs=1.4e-6), config
