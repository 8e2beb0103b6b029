"""What is refused before a model is split, and blocks that are compiled."""

import pytest
import torch
from torch import Tensor, nn

from models.llama import LlamaArgs
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Activation, Compile
from torchtitan_cp.parallel.apply import wrap_blocks
from torchtitan_cp.parallel.checks import check_tensor_parallel

SHAPE = LlamaArgs(32, 2, 4, 2, 8, 48, vocab_size=61)


def test_heads_that_tensor_parallelism_cannot_deal_out_are_refused_with_the_degrees_that_can() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)tp = 4 does not divide the model's n_kv_heads = 2.*use tp 1 or 2, and context"
    ):
        check_tensor_parallel(SHAPE, 4)
    check_tensor_parallel(SHAPE, 2)


class Windowed(nn.Module):
    """A block that is compiled anew for each window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[self.window :].sum()


@pytest.mark.deep
def test_blocks_of_many_kinds_are_compiled_where_torch_would_stop_after_eight() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(window): Windowed(window) for window in range(3)})
    wrap_blocks(model, Activation(), Compile(enable=True), "cpu")
    for rows in (20, 30, 40):  # the second makes the rows dynamic: 12 in all
        hidden = torch.ones(rows)
        for window, layer in enumerate(model.layers.values()):
            assert layer(hidden) == rows - window
            with torch.no_grad():
                assert layer(hidden) == rows - window
