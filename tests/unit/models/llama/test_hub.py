"""Options of the block that no published family has."""

import pytest

from models.llama import LlamaArgs
from models.llama.hub import HUB


def test_options_that_no_family_has_are_not_exported() -> None:
    shape = LlamaArgs(48, 4, 4, 2, 12, 96, 288)
    for options, message in (
        ({"sinks": True}, "no published family of this block has sinks"),
        ({"qkv_bias": True, "qk_norm": True}, "has qkv_bias and qk_norm"),
        ({"windows": (20, 30)}, r"mistral has one window in all layers that have any, and windows = \[20, 30\]"),
        ({"windows": (20, 0, 30, 0)}, r"ministral has one window in all layers that have any"),
    ):
        with pytest.raises(ValueError, match=message):
            HUB.config(LlamaArgs(**{**shape.__dict__, **options}))  # type: ignore[arg-type]


def test_windows_in_some_layers_are_ministrals() -> None:
    shape = LlamaArgs(48, 4, 4, 2, 12, 96, 288, windows=(20, 0))
    config = HUB.config(shape)
    assert (config["model_type"], config["sliding_window"]) == ("ministral", 20)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert LlamaArgs(**HUB.sizes(config)) == shape  # type: ignore[arg-type]
    without_kinds = {name: value for name, value in config.items() if name != "layer_types"}
    assert HUB.sizes(without_kinds)["windows"] == (20,)
    assert HUB.sizes({**without_kinds, "sliding_window": None})["windows"] == (0,)
