"""Packed documents in few kernel calls: the variable-length forms of flash and flash4, emulated, in fp64."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan import draw_lengths
from benchmarks.simulation import Simulation, simulate
from tests.support.emulated_ops import emulate
from tests.support.oracle import allowed, attention_with_gradients
from tests.support.plan_cases import cases
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.kernels import KERNELS
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.tiles import CAUSAL, Tile

SHORT = (20, 1, 9, 15, 4, 1, 1, 25, 20)
MASKS = {
    "documents, some of one row": AttentionMask(document_lengths=(SHORT,)),
    "one row each": AttentionMask(document_lengths=((1,) * 96,)),
    "rows packed differently": AttentionMask(document_lengths=(SHORT, (50, 46), (1, 1, 1, 93))),
    "gaps": AttentionMask(document_lengths=((30, 20, 6, 40), (96,)), used_lengths=((25, 20, 1, 35), (90,))),
    "windows": AttentionMask(window=(11, -1), document_lengths=(SHORT, (50, 46))),
    "windows on both sides": AttentionMask(causal=False, window=(11, 6), document_lengths=(SHORT,)),
    "not causal": AttentionMask(causal=False, document_lengths=(SHORT,)),
}
OPERATORS = {
    "flash": ("_flash_attention_forward", "_flash_attention_backward"),
    "flash4": ("flash4._flash_attn_fwd", "flash4._flash_attn_bwd"),
}
GROUPS = [("ring", 4), ("all_gather", 4), ("hybrid", 4)]
SMALLER = [("ring", 1), ("ring", 3), ("all_to_all", 2)]


def check(mask: AttentionMask, seq_len: int, ranks: int, strategy: str, layout: str, kernel: str) -> Simulation:
    """Simulate, and compare with the full sequence."""
    rows = 2 if len(mask.document_lengths or [()]) == 1 else len(mask.document_lengths or ())
    generator = torch.Generator().manual_seed(seq_len + ranks)
    q, k, v, dout = (
        torch.randn(rows, seq_len, heads, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((4, 8), (2, 8), (2, 16), (4, 16))
    )
    dout = torch.where(allowed(mask, seq_len).any(-1)[:, :, None, None], dout, 0)
    inner = 2 if strategy == "hybrid" and ranks % 2 == 0 else 1
    options = {"strategy": strategy, "layout": layout, "all_to_all_ranks": inner, "kernel": kernel}
    result = simulate(q, k, v, ranks=ranks, mask=mask, dout=dout, **options)  # type: ignore[arg-type]
    expected = attention_with_gradients(q, k, v, dout, mask)
    for got, want in zip((result.out, result.dq, result.dk, result.dv), expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want.nan_to_num(0.0), rtol=1e-10, atol=1e-10)
    return result


@pytest.mark.parametrize("kernel", OPERATORS)
@pytest.mark.parametrize(
    ("mask", "strategy", "ranks"),
    [*((mask, *group) for mask in MASKS for group in GROUPS), *(("gaps", *group) for group in SMALLER)],
)
def test_packed_tiles_equal_the_full_sequence(mask: str, strategy: str, ranks: int, kernel: str) -> None:
    with emulate() as calls:
        result = check(MASKS[mask], 96, ranks, strategy, "auto", kernel)
        if strategy != "all_gather":  # which has more calls, of some heads each
            wanted = sum(len(KERNELS[kernel].calls(step.tiles)) for plan in result.plans for step in plan.steps)
            assert calls == dict.fromkeys(OPERATORS[kernel], wanted)


@given(cases(), st.sampled_from(list(STRATEGIES)), st.sampled_from(list(OPERATORS)))
@settings(max_examples=50, deadline=None)
def test_any_mask_on_any_layout_and_exchange_equals_the_full_sequence(
    case: tuple[int, int, AttentionMask, str], strategy: str, kernel: str
) -> None:
    seq_len, ranks, mask, layout = case
    with emulate():
        check(mask, seq_len, ranks, strategy, layout, kernel)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_200_documents_on_8_ranks_take_two_calls_and_merges_a_step_at_most(strategy: str, name: str) -> None:
    mask = AttentionMask(document_lengths=(draw_lengths("log-normal", 4096, 200, seed=1),))
    q, k, v, dout = (torch.randn(1, 4096, 8, 8, dtype=torch.float32) for _ in range(4))
    merges: Counter[str] = Counter()

    def counted(of: type, name: str) -> object:
        add = of.add  # type: ignore[attr-defined]

        def counting(self: object, *arguments: object) -> None:
            merges[name] += 1
            add(self, *arguments)

        return patch.object(of, "add", counting)

    with emulate() as calls, counted(RunningSoftmax, "forward"), counted(GradientSum, "backward"):  # type: ignore[attr-defined]
        result = simulate(q, k, v, ranks=8, mask=mask, strategy=strategy, kernel=name, dout=dout)
        kernel = KERNELS[name]
    steps = [step.tiles for plan in result.plans for step in plan.steps]
    if strategy == "all_gather":  # one step for each group of heads
        steps = [plan.gathered_tiles for plan in result.plans for _ in range(4)]
    launched = [len(kernel.calls(tiles)) for tiles in steps]
    assert max(launched) <= 2
    assert calls == dict.fromkeys(OPERATORS[name], sum(launched))
    assert merges == {"forward": sum(launched), "backward": 3 * sum(launched)}  # of dq, dk and dv
    assert sum(len(kernel.plain_tiles(tiles)) for tiles in steps) > 200, "one call each before"


def test_tiles_that_share_rows_or_differ_to_the_kernel_are_calls_of_their_own() -> None:
    first, second = Tile(0, 0, 4, 0, 4, CAUSAL), Tile(0, 4, 9, 4, 9, CAUSAL)
    same_keys, same_queries = Tile(0, 9, 12, 0, 3, CAUSAL), Tile(0, 0, 2, 9, 11, CAUSAL)
    full, other_row = Tile(0, 9, 12, 9, 10), Tile(1, 0, 4, 0, 4, CAUSAL)
    tiles = (first, second, same_keys, same_queries, full, other_row)
    groups = [group for _, group in KERNELS["flash"].calls(tiles)]
    assert groups == [(first, second, other_row), (same_keys,), (same_queries,), (full,)]
    assert [group for _, group in KERNELS["reference"].calls(tiles[:2])] == [(first,), (second,)]
