"""FlexAttention: the masks and blocks that it is given, and how often it is compiled."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from tests.support.kernel_cases import draw, error
from tests.support.oracle import allowed
from torchtitan_cp.attention import AttentionMask, attend, make_plan, prepare_plan
from torchtitan_cp.attention.caching import BoundedCache
from torchtitan_cp.attention.kernels import KERNELS, ScoreMod, choose_for_case, flex
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.strategies.all_gather import arrange_rows
from torchtitan_cp.attention.strategies.strategy import KeyBlock, add_gradients, add_outputs


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses flex's backward on a CPU by a check alone: its dense maths work, for small masks."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


MASKS = [
    AttentionMask(),
    AttentionMask(causal=False, window=(70, 30)),
    AttentionMask(document_lengths=((100, 300, 112), (512,))),
    AttentionMask(window=(90, -1), document_lengths=((400, 112),)),
    AttentionMask(document_lengths=((300, 212),), used_lengths=((170, 200),)),
]


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("mask", MASKS)
def test_flex_blocks_and_mask_are_those_of_the_tiles(mask: AttentionMask, layout: str) -> None:
    for rank in range(2):
        plan = make_plan(512, mask=mask, ranks=2, rank=rank, layout=layout)
        source = make_plan(512, mask=mask, ranks=2, rank=1 - rank, layout=layout)
        for step in plan.steps:
            if not step.receive:
                continue
            held = (plan if step.source == rank else source).positions
            keys = torch.cat([held[start:stop] for start, stop in step.receive])
            blocks, hidden = flex.block_mask(step.tiles, torch.empty(2, 256, 1, 16), len(keys))
            want = allowed(mask, 512)[:, plan.positions][:, :, keys]
            rows = hidden.shape[0]
            got = flex_attention.create_mask(blocks.mask_mod, rows, 1, 256, len(keys), device="cpu")[:, 0]
            assert torch.equal(got.expand_as(want), want)
            assert torch.equal(hidden.expand(len(want), -1), ~want.any(-1))
            dense = blocks.to_dense()[:, 0].bool()
            exact = F.pad(want, (0, -len(keys) % 128)).unflatten(1, (2, 128)).unflatten(3, (-1, 128)).any(4).any(2)
            assert (dense.expand_as(exact) | ~exact).all(), "a block with an allowed pair is visited"


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "hybrid"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_flex_are_made_ahead_and_only_for_flex(
    mask: AttentionMask, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    intervals = flex.key_intervals
    monkeypatch.setattr(flex, "key_intervals", lambda *tiles: made.append(1) or intervals(*tiles))
    for cache in ("_prepared", "_masks"):
        monkeypatch.setattr(flex, cache, BoundedCache(flex.MASK_BYTES))
    options: Any = {"mask": mask, "ranks": 4, "rank": 1, "strategy": strategy}
    options["all_to_all_ranks"] = inner = 2 if strategy == "hybrid" else 1
    prepare_plan(make_plan(512, kernel="auto", **options))
    assert not made
    plan = make_plan(512, kernel="flex", **options)
    prepare_plan(plan)
    prepare_plan(plan)
    steps = [(step.tiles, sum(stop - start for start, stop in step.receive)) for step in plan.steps]
    if strategy == "all_gather":
        [(tiles, rows)] = arrange_rows(plan, KERNELS["flex"])
        steps = [(tiles, sum(stop - start for _, start, stop in rows))]
    ready = len(made)
    assert ready == len({step for step in steps if step[0]})
    for tiles, keys in steps:
        if tiles:
            flex.block_mask(tiles, torch.empty(len(mask.document_lengths or "1"), 128 * inner, 1, 16), keys)
    assert len(made) == ready, "the operator finds what was prepared"


def test_masks_of_flex_are_kept_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_masks", BoundedCache(flex.MASK_BYTES))
    masks = [AttentionMask(document_lengths=((cut, 1024 - cut),)) for cut in range(100, 110)]
    tiles = [make_plan(1024, mask=mask).steps[0].tiles for mask in masks]
    q = torch.empty(1, 1024, 1, 16)
    _, hidden = flex.block_mask(tiles[0], q, 1024)
    one = flex._masks.held_bytes
    # Four tables of 8 x 8 blocks, their counts, an interval of each row, and the rows that see nothing.
    assert one == 4 * (4 * 64 + 4 * 8) + 2 * 4 * 1024 + hidden.nbytes
    monkeypatch.setattr(flex._masks, "budget_bytes", 3 * one)
    for number in range(10):
        flex.block_mask(tiles[number], q, 1024)
    assert flex._masks.held_bytes == 3 * one
    assert [key[0][0] for key in flex._masks.entries] == tiles[-3:], "the newest"


@pytest.mark.parametrize("scores", ["plain", "capped"])
@pytest.mark.parametrize("mask", MASKS)
def test_flex_does_a_whole_step_in_one_call(mask: AttentionMask, scores: str, flex_on_cpu: None) -> None:
    plan = make_plan(512, mask=mask, ranks=2, rank=1, layout="zigzag")
    tensors = [x.double() for x in draw(256, 256, (4, 2), (16, 16), "cpu", torch.float32)]
    kernel, reference, tiles = KERNELS["flex"], KERNELS["reference"], plan.steps[0].tiles
    how = {"plain": ScoreMod(0.2), "capped": ScoreMod(0.2, 1.5)}[scores]
    q, k, v, dout = tensors
    merged = RunningSoftmax(q, 16)
    block = KeyBlock(k, v, tiles, how)
    add_outputs(merged, q, block, reference)
    # Keys of an earlier step, so that the log-sum-exp is not of this step alone.
    merged.add((slice(None), slice(None)), torch.randn_like(q), torch.randn(q.shape[:3], dtype=q.dtype))
    out, lse = merged.result()
    sums = [GradientSum(x) for x in (q, k, v)]
    add_gradients(sums, (dout, q, out, lse), block, reference)
    for got, want in zip(kernel.backward(dout, q, k, v, out, lse, tiles, how), sums, strict=True):
        assert (got - want.total()).norm() < 1e-5 * want.total().norm()
    alone = RunningSoftmax(q, 16)
    add_outputs(alone, q, block, reference)
    step_out, step_lse = kernel.forward(q, k, v, tiles, how)
    assert (step_out - alone.result()[0]).norm() < 1e-5 * step_out.norm()
    torch.testing.assert_close(step_lse.double(), alone.result()[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["eager", "compiled"])
def test_flex_runs_inside_the_operator_where_autograd_is_off(
    compiled: bool, flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "flex", replace(KERNELS["flex"], device="cpu"))
    choose_for_case.cache_clear()
    mask = AttentionMask(document_lengths=((100, 156),))

    def run(kernel: str, compiled: bool) -> list[Tensor]:
        plan = make_plan(256, mask=mask, ranks=1, rank=0, kernel=kernel)
        q, k, v, dout = draw(256, 256, (4, 2), (16, 16), "cpu", torch.float32)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        # Not the leaves themselves: a tensor with a history must reach the operator as well.
        block = lambda q, k, v: attend(q * 1.5, k, v, plan) * 2  # noqa: E731
        out = (torch.compile(block, fullgraph=True) if compiled else block)(*leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    for got, want in zip(run("flex", compiled), run("reference", False), strict=True):
        assert error(got, want.double()) < 2e-6
    choose_for_case.cache_clear()


def test_flex_compiles_no_graph_for_each_new_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention.flex_attention, backend=graphs, fullgraph=True)
    monkeypatch.setattr(flex, "_attention", lambda on_cuda: compiled)
    generator = torch.Generator().manual_seed(3)
    for number in range(6):
        cuts = sorted(int(x) for x in 1 + torch.randperm(1022, generator=generator)[: 2 + number])
        documents = tuple(stop - start for start, stop in pairwise([0, *cuts, 1024]))
        for mask in (AttentionMask(document_lengths=(documents,)), AttentionMask(window=(64 + 5 * number, -1))):
            for step in make_plan(1024, mask=mask, ranks=4, rank=1, layout="zigzag").steps:
                keys = sum(stop - start for start, stop in step.receive)
                if step.tiles:
                    q, k, v, _ = draw(256, keys, (4, 2), (16, 16), "cpu", torch.float32)
                    flex.forward(q, k, v, step.tiles, ScoreMod(0.2))
    assert graphs.frame_count <= 4, "the first shapes, any length of keys, one and many intervals"


def test_flex_is_compiled_as_often_as_there_are_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    flex._attention.cache_clear()
    flex._attention(True)
    assert torch._dynamo.config.recompile_limit == torch._dynamo.config.accumulated_recompile_limit
