"""Fixtures of all tests: pools of ranks, one for each size, that live as long as the session."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from models import ARCHITECTURES
from tests.support.rank_pool import RankPool
from torchtitan_cp.training.registry import register

register(ARCHITECTURES)
gc.disable()  # until all tests are imported, which takes a third less time

TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """transformers 5.23 and later, which architecture = "huggingface" needs, are not for Python 3.10."""
    return True if sys.version_info < (3, 11) and "huggingface" in str(collection_path.relative_to(TESTS)) else None


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)(function, *arguments)` runs a module-level function on four gloo ranks."""
    pools: dict[int, RankPool] = {}

    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.stop()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Later collections leave out what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests marked cuda need the hardware. Those of one file share fixtures and ranks, so one worker takes them."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.path.relative_to(TESTS).as_posix()))
