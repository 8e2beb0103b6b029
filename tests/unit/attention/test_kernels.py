"""Each kernel on its device against the reference kernel in fp64: tiles, groups of heads, and merged backwards.

The bodies run here with the kernels of the CPU, and on a GPU with those of CUDA.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from tests.support.emulated_ops import EMULATED, emulate
from tests.support.oracle import allowed
from torchtitan_cp.attention import OPERATOR, AttentionMask, PlanError, attend, make_plan, prepare_plan
from torchtitan_cp.attention.caching import BoundedCache
from torchtitan_cp.attention.kernels import (
    KERNELS,
    ScoreMod,
    choose_for_case,
    choose_kernel,
    efficient,
    flash,
    flex,
)
from torchtitan_cp.attention.kernels.kernel import Case
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.strategies.all_gather import arrange_rows
from torchtitan_cp.attention.strategies.strategy import KeyBlock, add_gradients, add_outputs
from torchtitan_cp.attention.tiles import ALL_ROWS, CAUSAL, FULL, Tile

CUDA = pytest.mark.cuda
RUNS = [
    pytest.param("cpu", "cpu", torch.float64, id="cpu-fp64"),
    pytest.param("cpu", "cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", "cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("reference", "cpu", torch.float32, id="reference-fp32"),
    *(pytest.param(name, "cuda", torch.bfloat16, marks=CUDA, id=f"{name}-bf16") for name in ("flash", "cudnn", "flex")),
    *(pytest.param(name, "cuda", torch.float16, marks=CUDA, id=f"{name}-fp16") for name in ("flash", "cudnn")),
    *(pytest.param("efficient", "cuda", x, marks=CUDA, id=f"efficient-{x}") for x in (torch.float32, torch.bfloat16)),
]
TILES = {
    "full": (128, 192, FULL),
    "causal": (160, 160, CAUSAL),
    "a window's band": (128, 200, Band(-20, 40)),
    "later keys": (96, 96, Band(0, None)),
    "keys before": (64, 200, Band(None, 136)),
    "more queries than keys, early": (160, 40, Band(None, 8)),
    "more queries than keys, late": (160, 40, Band(-130, None)),
}
HEADS = [(4, 4), (8, 2), (4, 1)]
DIMS = [(64, 64), (128, 64), (128, 128)]


def draw(
    queries: int, keys: int, heads: tuple[int, int], dims: tuple[int, int], device: str, dtype: torch.dtype
) -> Any:
    generator = torch.Generator().manual_seed(queries + keys + heads[0])
    shapes = [(queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1])]
    shapes.append((queries, heads[0], dims[1]))
    return [torch.randn(2, *shape, generator=generator).to(device, dtype) for shape in shapes]


def run_tiles(name: str, tiles: list[Tile], tensors: list[Tensor], together: bool = False) -> list[Tensor]:
    """out, dq, dk, dv of tiles in one step or a step each, merged, and backward from the merged log-sum-exp."""
    steps = [tuple(tiles)] if together else [(tile,) for tile in tiles]
    q, k, v, dout = tensors
    kernel = KERNELS[name]
    softmax = RunningSoftmax(q, v.shape[-1])
    for step in steps:
        add_outputs(softmax, q, KeyBlock(k, v, step, ScoreMod(0.11)), kernel)
    out, lse = softmax.result()
    sums = [GradientSum(x) for x in (q, k, v)]
    for step in steps:
        add_gradients(sums, (dout, q, out, lse), KeyBlock(k, v, step, ScoreMod(0.11)), kernel)
    return [out, *(gradient.total() for gradient in sums)]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()


# Of a kernel that keeps its sums in fp32: roundings of the inputs' dtype in P and dS, and of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def check(name: str, dtype: torch.dtype, tiles: list[Tile], tensors: list[Tensor], together: bool = False) -> None:
    exact = run_tiles("reference", tiles, [x.double().cpu() for x in tensors])
    found = run_tiles(name, tiles, tensors, together)
    for part, got, want in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert got.isfinite().all(), part
        assert error(got, want) < TOLERANCE[dtype], (part, error(got, want))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_a_tile_equals_the_reference_forward_and_backward(
    name: str, device: str, dtype: torch.dtype, tile: str, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    queries, keys, band = TILES[tile]
    tensors = draw(queries, keys, heads, dims, device, dtype)
    check(name, dtype, [Tile(ALL_ROWS, 0, queries, 0, keys, band)], tensors)


@pytest.mark.deep
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", EMULATED)
def test_a_tile_over_emulated_operators_equals_the_reference(name: str, tile: str) -> None:
    queries, keys, band = TILES[tile]
    with emulate():
        for dtype in (torch.float64, torch.bfloat16):
            tensors = draw(queries, keys, (4, 2), (64, 32), "cpu", dtype)
            check(name, dtype, [Tile(ALL_ROWS, 0, queries, 0, keys, band)], tensors)


@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_a_row_whose_keys_come_in_three_tiles_is_merged_and_differentiated_from_the_merged_sum(
    name: str, device: str, dtype: torch.dtype
) -> None:
    edges = [0, 64, 160, 256]
    tiles = [Tile(ALL_ROWS, 0, 128, start, stop) for start, stop in pairwise(edges)]
    check(name, dtype, tiles, draw(128, 256, (8, 2), (64, 64), device, dtype))


@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_batch_rows_may_have_tiles_of_their_own(name: str, device: str, dtype: torch.dtype) -> None:
    tiles = [Tile(0, 0, 100, 0, 100, CAUSAL), Tile(1, 10, 90, 20, 128), Tile(1, 90, 128, 0, 60)]
    check(name, dtype, tiles, draw(128, 128, (4, 2), (64, 64), device, dtype))


PACKED = {
    "side by side": [Tile(ALL_ROWS, x, y, x, y, CAUSAL) for x, y in pairwise((0, 30, 31, 100, 101, 128))],
    "apart": [Tile(ALL_ROWS, 3, 40, 0, 20), Tile(ALL_ROWS, 60, 61, 40, 90), Tile(ALL_ROWS, 70, 120, 100, 128)],
    "of some rows": [Tile(0, 0, 100, 0, 100, CAUSAL), Tile(1, 10, 60, 20, 70, CAUSAL), Tile(1, 60, 128, 70, 128)],
    "one row each": [Tile(ALL_ROWS, x, x + 1, 3 * x, 3 * x + 3) for x in range(20)],
    "windows": [Tile(ALL_ROWS, x, y, x, y, Band(-20, 0)) for x, y in pairwise((0, 50, 128))],
}


@pytest.mark.parametrize("tiles", PACKED)
@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_tiles_of_a_step_equal_the_reference_forward_and_backward(
    name: str, device: str, dtype: torch.dtype, tiles: str
) -> None:
    check(name, dtype, PACKED[tiles], draw(128, 128, (4, 2), (64, 64), device, dtype), together=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(n, torch.bfloat16, marks=CUDA) for n in ("flash", "cudnn", "efficient", "flex")],
)
def test_error_on_the_gpu_is_no_worse_than_one_sdpa_call(name: str, dtype: torch.dtype) -> None:
    tensors = draw(512, 512, (8, 2), (64, 64), "cuda", dtype)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.11, enable_gqa=True)
    out.backward(tensors[3].transpose(1, 2))
    alone = [x.transpose(1, 2) for x in (out.detach(), *(leaf.grad for leaf in leaves))]
    whole = [Tile(ALL_ROWS, 0, 512, 0, 512, CAUSAL)]
    exact = run_tiles("reference", whole, [x.double().cpu() for x in tensors])
    split = [Tile(ALL_ROWS, 0, 256, 0, 256, CAUSAL), Tile(ALL_ROWS, 256, 512, 0, 256)]
    split.append(Tile(ALL_ROWS, 256, 512, 256, 512, CAUSAL))
    for got, single, want in zip(run_tiles(name, split, tensors), alone, exact, strict=True):
        assert error(got, want) <= 1.5 * error(single, want)


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


def test_tiles_of_a_window_that_flash_misreads_reach_it_in_parts() -> None:
    """The window ends inside a later piece, so its tile has more queries than keys, and a bounded side."""
    mask = AttentionMask(causal=False, window=(90, 90), document_lengths=((130, 126),))
    misread = 0
    for rank in range(4):
        for step in make_plan(256, mask=mask, ranks=4, rank=rank, layout="zigzag").steps:
            for tile in KERNELS["flash"].plain_tiles(step.tiles):
                assert flash.takes_band(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band)
            misread += any(
                not flash.takes_band(tile.q_stop - tile.q_start, tile.k_stop - tile.k_start, tile.band)
                for tile in step.tiles
            )
    assert misread, "this mask has such tiles"


CASES = {
    "cpu": [(Case("cpu", torch.bfloat16, 64, 128), None), (Case("cuda", torch.float32, 64, 64), "on cpu, not cuda")],
    "flash": [
        (Case("cuda", torch.bfloat16, 256, 64), None),
        (Case("cuda", torch.float32, 64, 64), "not torch.float32"),
        (Case("cuda", torch.float16, 60, 64), None),
        (Case("cuda", torch.float16, 60, 60), "from 8 to 256 in steps of 8, not 60"),
        (Case("cpu", torch.bfloat16, 64, 64), "on cuda, not cpu"),
    ],
    "cudnn": [
        (Case("cuda", torch.bfloat16, 128, 64), None),
        (Case("cuda", torch.bfloat16, 192, 128), "from 8 to 128 in steps of 8, not 192 and 128"),
    ],
    "efficient": [
        (Case("cuda", torch.float32, 192, 128), None),
        (Case("cuda", torch.float64, 64, 64), "not torch.float64"),
    ],
    "flex": [
        (Case("cuda", torch.bfloat16, 64, 64), None),
        (Case("cpu", torch.float32, 64, 64), "on cuda, not cpu"),
    ],
    "reference": [
        (Case("cuda", torch.float64, 3, 5), None),
        (Case("cpu", torch.int64, 8, 8), "or torch.float16, not torch.int64"),
    ],
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_what_it_cannot_run(name: str) -> None:
    for case, reason in CASES[name]:
        refusal = KERNELS[name].refusal(case)
        assert (refusal is None) if reason is None else (refusal is not None and reason in refusal), case


def test_a_kernel_asked_for_that_cannot_names_those_that_can() -> None:
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(
        PlanError, match="attention kernel 'cudnn' cannot run this: it runs on cuda, not cpu; use cpu or"
    ):
        choose_kernel("cudnn", x, x)
    assert choose_kernel("auto", x, x) is KERNELS["cpu"]
    with pytest.raises(PlanError, match=r"cannot run this: it takes .* or torch.float16, not torch.int64; change"):
        choose_kernel("auto", x.long(), x.long())


def test_the_log_names_the_kernel_in_one_short_line_and_the_reasons_at_debug_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose_for_case.cache_clear()
    x = torch.zeros(1, 8, 2, 16)
    with caplog.at_level("DEBUG", "torchtitan_cp.attention.kernels"):
        choose_kernel("auto", x, x)
    [(_, _, chosen), (_, _, others)] = caplog.record_tuples
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]
    assert chosen == "attention kernel cpu for float32 on cpu"
    assert "flash: it runs on cuda, not cpu" in others


H100, B200, A100, RTX = (9, 0), (10, 0), (8, 0), (12, 0)
BFLOAT16 = Case("cuda", torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    ("case", "chosen", "of_windows"),
    [
        (BFLOAT16._replace(capability=H100), "cudnn", "flash"),
        (BFLOAT16._replace(capability=B200, dtype=torch.float16), "cudnn", "flash"),
        (BFLOAT16._replace(capability=H100, qk_dim=192), "flash", "flash"),
        (BFLOAT16._replace(capability=H100, dtype=torch.float32), "efficient", "efficient"),
        (BFLOAT16._replace(capability=H100, softcap=True), "flex", "flex"),
        (BFLOAT16._replace(capability=H100, deterministic=True), "flash", "flash"),
        (BFLOAT16._replace(capability=A100), "flash", "flash"),
        (BFLOAT16._replace(capability=RTX), "flash", "flash"),
        (BFLOAT16, "flash", "flash"),
    ],
)
def test_auto_goes_by_capability_and_by_the_tiles(case: Case, chosen: str, of_windows: str) -> None:
    assert choose_for_case("auto", case) == chosen
    assert choose_for_case("auto", case._replace(dense=False)) == of_windows
    if case.dtype != torch.float32 and not case.softcap:
        assert choose_for_case("flash", case) == "flash", "a kernel by name is honoured"


@pytest.mark.parametrize(
    ("mask", "dense"),
    [
        (AttentionMask(), True),
        (AttentionMask(causal=False), True),
        (AttentionMask(window=(20, -1)), False),
        (AttentionMask(causal=False, window=(-1, 20)), False),
        (AttentionMask(document_lengths=((4, 4),)), False),
        (AttentionMask(document_lengths=((8,),), used_lengths=((5,),)), False),
    ],
)
def test_a_mask_says_whether_its_tiles_are_full_or_causal(mask: AttentionMask, dense: bool) -> None:
    assert mask.dense is dense
    for rank in range(2):
        tiles = [tile for step in make_plan(8, mask=mask, ranks=2, rank=rank).steps for tile in step.tiles]
        assert not dense or all(tile.band in (FULL, CAUSAL) for tile in tiles)


def test_the_log_says_which_kernel_runs_on_a_gpu_and_for_what(caplog: pytest.LogCaptureFixture) -> None:
    choose_for_case.cache_clear()
    with caplog.at_level("INFO", "torchtitan_cp.attention.kernels"):
        for dense in (True, False):
            choose_for_case("auto", BFLOAT16._replace(capability=H100, dense=dense))
    assert [record.message for record in caplog.records] == [
        "attention kernel cudnn for bfloat16 on cuda 9.0, the first that can for full and causal tiles",
        "attention kernel flash for bfloat16 on cuda 9.0, the first that can for windows or packed documents",
    ]


def test_the_capability_is_asked_for_where_a_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.bfloat16, shape=(1, 8, 2, 128))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_kernel("auto", x, x) is KERNELS["flash"], "tensors without data, where no GPU is"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H100)
    assert choose_kernel("auto", x, x) is KERNELS["cudnn"]
    assert choose_kernel("auto", x, x, dense=False) is KERNELS["flash"]
    assert choose_kernel("efficient", x, x) is KERNELS["efficient"]


def test_the_efficient_kernel_gets_rows_of_out_that_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no other stride of them; all_gather passes slices of the heads."""
    strides = []

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *_: Any, **__: Any) -> Any:
        strides.append(out.stride())
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    monkeypatch.setattr(efficient, "_BACKWARD", backward)
    whole = torch.randn(1, 32, 4, 8)
    q = out = whole[:, :, 1:3]
    efficient.backward(out, q, q, q, out, torch.zeros(1, 32, 2), FULL, ScoreMod(1.0))
    [(_, _, row, _)] = strides
    assert row == 2 * 8


def test_a_graph_that_is_replayed_leaves_attention_out() -> None:
    for operator in (OPERATOR, torch.ops.torchtitan_cp.attention_backward.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_flex_is_compiled_as_often_as_there_are_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    flex._attention.cache_clear()
    flex._attention(True)
    assert torch._dynamo.config.recompile_limit == torch._dynamo.config.accumulated_recompile_limit


def test_a_sink_of_minus_infinity_is_no_sink_and_padding_stays_zero() -> None:
    mask = AttentionMask(document_lengths=((12, 20),), used_lengths=((9, 20),))
    plan = make_plan(32, mask=mask)
    q, k, v, dout = draw(32, 32, (4, 2), (16, 16), "cpu", torch.float64)
    answers = []
    for sinks in (None, torch.full((4,), float("-inf"), dtype=torch.float64).requires_grad_()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, plan, sinks=sinks)
        out.backward(dout)
        answers.append([out.detach(), *(x.grad for x in leaves)])
    assert sinks is not None
    assert sinks.grad is not None
    assert sinks.grad.abs().max() == 0
    for want, got in zip(*answers, strict=True):
        assert torch.equal(got, want)
    assert answers[1][0][:, 9:12].abs().max() == 0


@pytest.mark.parametrize("softcap", [-2.0, float("nan")])
def test_a_soft_cap_that_is_no_bound_is_refused_by_every_kernel(softcap: float) -> None:
    q = torch.zeros(1, 8, 1, 16)
    for kernel in ("cpu", "reference"):
        with pytest.raises(PlanError, match="is not at least 0; give a positive number, or 0 for none"):
            attend(q, q, q, make_plan(8, kernel=kernel), softcap=softcap)


@pytest.mark.parametrize("kernel", ["cpu", "reference", *EMULATED])
def test_no_kernel_is_given_an_empty_batch(kernel: str) -> None:
    leaves = [torch.zeros(0, 64, 2, 16, requires_grad=True) for _ in "qkv"]
    with emulate():
        attend(*leaves, make_plan(64, mask=AttentionMask(document_lengths=((20, 44),)), kernel=kernel)).sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_heads_whose_numbers_do_not_lie_side_by_side_are_read_right(kernel: str) -> None:
    plan = make_plan(32, kernel=kernel)
    *inputs, dout = draw(32, 32, (4, 2), (16, 16), "cpu", torch.float64)
    answers = []
    for order in (lambda x: x, lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)):
        leaves = [order(x).detach().requires_grad_() for x in inputs]
        out = attend(*leaves, plan)
        out.backward(order(dout))
        answers.append([out.detach(), *(x.grad for x in leaves)])
    assert leaves[0].stride(-1) != 1
    for want, got in zip(*answers, strict=True):
        torch.testing.assert_close(got, want)
