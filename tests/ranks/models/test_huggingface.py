"""Families of transformers on ranks give the loss and gradients of one process with transformers' own attention."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.huggingface_families import ON_RANKS
from tests.support.huggingface_parity import compare_compiled, compare_on_ranks, write_family
from tests.support.rank_pool import RankPool

RING = "--context_parallel.strategy=ring"
ALL_TO_ALL = "--context_parallel.strategy=all_to_all"
FULL = "--activation.checkpoint=full"
SAVED = "--activation.checkpoint=attention_saved"


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[] if n == "Gemma 3" else pytest.mark.deep) for n in ON_RANKS]
)
def test_two_ranks_by_ring_compiled_and_recomputed_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path, family)
    result = ranks(2)(compare_compiled, path, family, "--parallel.cp=2", RING, FULL)[0]
    result.check()


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[] if n == "gpt-oss" else pytest.mark.deep) for n in ON_RANKS]
)
def test_four_ranks_by_all_to_all_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path, family)
    result = ranks(4)(compare_on_ranks, path, family, "--parallel.cp=2", ALL_TO_ALL, SAVED)[0]
    result.check()
