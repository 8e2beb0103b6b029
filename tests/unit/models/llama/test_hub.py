"""Options of the block that no published family has."""

import pytest

from models.llama import LlamaArgs
from models.llama.hub import HUB


def test_options_that_no_family_has_are_not_exported() -> None:
    shape = LlamaArgs(48, 4, 4, 2, 12, 96, 288)
    for options, message in (
        ({"sinks": True}, "no published family of this block has sinks"),
        ({"qkv_bias": True, "qk_norm": True}, "has qkv_bias and qk_norm"),
        ({"windows": (20, 0)}, r"mistral has one window in every layer, and windows = \[20, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            HUB.config(LlamaArgs(**{**shape.__dict__, **options}))  # type: ignore[arg-type]
