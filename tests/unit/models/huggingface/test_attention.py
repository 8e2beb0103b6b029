"""What layers may ask of attention across ranks."""

from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface

from models.huggingface.attention import attention, registered


def test_a_function_of_an_interface_is_replaced_within_a_context_whatever_happens_there() -> None:
    functions = AttentionMaskInterface._global_mapping
    before = dict(functions)
    for name in ("eager", "of ours"):
        with pytest.raises(ZeroDivisionError), registered(AttentionMaskInterface, name, lambda: 1 / 0):
            functions[name]()
        assert functions == before


@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.ones(1), "unused": None}, "position_bias"),
        ({"s_aux": torch.ones(1, 4)}, "sinks by token"),
    ],
)
def test_a_layer_that_asks_for_more_than_attention_across_ranks_has_is_refused(
    keywords: dict[str, Any], what: str
) -> None:
    q = torch.ones(1, 1, 4, 8)
    keywords = {"attention_mask": None, **keywords}
    with pytest.raises(ValueError, match=f"Linear calls attention with {what}, which is not supported"):
        attention(torch.nn.Linear(1, 1), q, q, q, **keywords)
