"""What is refused before a model is split."""

import pytest

from models.llama import LlamaArgs
from torchtitan_cp.config import ConfigError
from torchtitan_cp.parallel.checks import check_tensor_parallel

SHAPE = LlamaArgs(32, 2, 4, 2, 8, 48, vocab_size=61)


def test_heads_that_tensor_parallelism_cannot_deal_out_are_refused_with_the_degrees_that_can() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)tp = 4 does not divide the model's n_kv_heads = 2.*use tp 1 or 2, and context"
    ):
        check_tensor_parallel(SHAPE, 4)
    check_tensor_parallel(SHAPE, 2)
