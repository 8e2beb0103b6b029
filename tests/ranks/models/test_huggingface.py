"""Families of transformers on ranks give the loss and gradients of one process with transformers' own attention."""

import itertools
from collections.abc import Callable
from pathlib import Path

from tests.support.deep import deep_rows
from tests.support.huggingface_families import ON_RANKS
from tests.support.huggingface_parity import compare_compiled, compare_on_ranks, write_family
from tests.support.rank_pool import RankPool

RING = "--context_parallel.strategy=ring"
ALL_TO_ALL = "--context_parallel.strategy=all_to_all"
BOTH = "--context_parallel.strategy=hybrid --context_parallel.all_to_all_ranks=2"
FULL = "--activation.checkpoint=full"
SAVED = "--activation.checkpoint=attention_saved"
# torch.compile takes no layer that hands its keys on from within a part that is recomputed.
HAND_KEYS_ON = ("Gemma 4",)
HYBRIDS = ("Nemotron-H", "Qwen3-Next", "Kimi Linear", "Granite 4 hybrid", "LFM2")


@deep_rows("family", ON_RANKS, default=[])
def test_two_ranks_by_ring_compiled_and_recomputed_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    recomputed = [] if family in HAND_KEYS_ON else [FULL]
    path = write_family(tmp_path, family)
    ranks(2)(compare_compiled, path, family, "--parallel.cp=2", RING, *recomputed)[0].check()


@deep_rows("family", ON_RANKS, default=["Gemma 3"])
def test_four_ranks_by_all_to_all_and_recomputed_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path, family)
    ranks(4)(compare_on_ranks, path, family, "--parallel.cp=2", ALL_TO_ALL, SAVED)[0].check()


@deep_rows(
    ("family", "layout", "strategy"),
    [*itertools.product(HYBRIDS, ("zigzag", "documents"), (RING, ALL_TO_ALL)), ("LFM2", "zigzag", BOTH)],
    default=[("Nemotron-H", "zigzag", RING), ("Kimi Linear", "documents", ALL_TO_ALL)],
)
def test_states_that_pass_between_four_ranks_give_the_gradients_of_one_process(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str, layout: str, strategy: str
) -> None:
    path = write_family(tmp_path, family)
    options = ("--parallel.cp=4", *strategy.split(), f"--context_parallel.layout={layout}", FULL)
    ranks(4)(compare_on_ranks, path, family, *options)[0].check()


@deep_rows("family", ("Qwen3-MoE", "DeepSeek-V3", "Qwen3-Next", "Nemotron-H"), default=["DeepSeek-V3"])
def test_two_ranks_that_share_experts_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path, family)
    found = ranks(2)(compare_on_ranks, path, family, "--parallel.cp=2", "--parallel.ep=2", FULL)[0]
    assert abs(found.loss - found.eager_loss) <= 1e-5 * found.eager_loss
    assert max(found.errors.values()) <= 1e-5, found.errors
