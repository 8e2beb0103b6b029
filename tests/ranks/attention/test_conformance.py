"""Every exchange, layout, mask, head shape and dtype on real ranks against the whole sequence in fp64."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.deep import deep_rows
from tests.support.emulated_ops import EMULATED, emulate
from tests.support.oracle import allowed, attention_with_gradients, attention_with_sinks
from tests.support.rank_pool import RankPool, rank_device
from torchtitan_cp.attention import AttentionMask, ContextParallel, ContextParallelError, PlanError
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.strategies import STRATEGIES

S, BATCH, SCALE = 96, 2, 0.3
CHUNKS = 12

MASKS = {
    "causal": AttentionMask(),
    "bidirectional": AttentionMask(causal=False),
    "window": AttentionMask(window=(13, -1)),
    "window both ways": AttentionMask(causal=False, window=(5, 11)),
    "documents": AttentionMask(document_lengths=((7, 1, 53, 35),)),
    "documents of two rows": AttentionMask(document_lengths=((96,), (1, 94, 1))),
    "documents of length 1": AttentionMask(document_lengths=((1,) * 96,)),
    "bidirectional documents": AttentionMask(causal=False, document_lengths=((5, 91), (47, 49))),
    "window and documents": AttentionMask(window=(17, -1), document_lengths=((7, 59, 30),)),
    "documents with gaps": AttentionMask(document_lengths=((8, 40, 48),), used_lengths=((5, 40, 31),)),
}
HEADS = {"MHA": (4, 4), "GQA 4:1": (8, 2), "MQA": (4, 1), "3 heads": (3, 3), "6 heads of 2": (6, 2)}
DIMS = {
    "16/16": (16, 16),
    "32/32": (32, 32),
    "32/16": (32, 16),
    "64/64": (64, 64),
    "128/64": (128, 64),
    "8/24": (8, 24),
}
GRID_DIMS = ["16/16", "64/64", "128/64", "8/24"]
ALL_STRATEGIES = [*STRATEGIES, "auto"]
NAMES = ("out", "dq", "dk", "dv")
DTYPES = [torch.float64, torch.float32]

Case = tuple[str, str, str, torch.dtype]


def inputs(heads: str, dims: str, dtype: torch.dtype, seq_len: int = S, batch: int = BATCH) -> list[Tensor]:
    """q, k, v and dout, the same on every rank, and on its device."""
    (hq, hkv), (qk_dim, v_dim) = HEADS[heads], DIMS[dims]
    generator = torch.Generator().manual_seed(seq_len + 7 * hq + hkv + qk_dim)
    shapes = [(hq, qk_dim), (hkv, qk_dim), (hkv, v_dim), (hq, v_dim)]
    drawn = [torch.randn(batch, seq_len, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(rank_device(), dtype) for x in drawn]


def batch_of(mask: str, heads: str) -> int:
    """An odd batch where the mask allows it."""
    return 3 if heads == "3 heads" and len(MASKS[mask].document_lengths or ((),)) == 1 else BATCH


@lru_cache(maxsize=1)
def mesh_axes(size: int) -> Any:
    """(ring, all-to-all) sizes of a hybrid mesh."""
    return {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}.get(size, (size // 2, 2))


@lru_cache
def make_cp(strategy: str, layout: str, kernel: str = "auto", kv_transfer: str = "exact") -> ContextParallel:
    size = dist.get_world_size()
    shape = mesh_axes(size) if strategy == "hybrid" else (size,)
    return ContextParallel(init_device_mesh(rank_device().type, shape), strategy, kernel, layout, kv_transfer)


def run(cp: ContextParallel, tensors: list[Tensor], mask: AttentionMask, sinks: Tensor | None = None) -> list[Tensor]:
    """On a rank: attention of its shard; the gathered out, dq, dk, dv, and this rank's dsinks."""
    q, k, v, dout = tensors
    plan = cp.plan(q.shape[1], mask)
    local = [plan.shard(x).detach().requires_grad_() for x in (q, k, v)]
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    out = cp.attention(*local, plan, scale=SCALE, sinks=sinks)
    assert out.dtype == q.dtype
    out.backward(plan.shard(dout))
    gathered = [plan.unshard(x) for x in (out.detach(), *(x.grad for x in local))]  # type: ignore[arg-type]
    return gathered if sinks is None else [*gathered, sinks.grad]  # type: ignore[list-item]


def run_cases(strategy: str, layout: str, cases: list[Case], kernel: str = "auto") -> list[list[Tensor]]:
    answers = []
    for mask, heads, dims, dtype in cases:
        tensors = inputs(heads, dims, dtype, batch=batch_of(mask, heads))
        answers.append(run(make_cp(strategy, layout, kernel), tensors, MASKS[mask]))
    return answers if dist.get_rank() == 0 else []


@cache
def expected(mask: str, heads: str, dims: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The oracle's answer to inputs as `dtype` holds them; rows of padding give nothing."""
    q, k, v, dout = inputs(heads, dims, dtype, batch=batch_of(mask, heads))
    token = allowed(MASKS[mask], S).any(-1)[:, :, None, None]
    answer = attention_with_gradients(q, k, v, torch.where(token, dout, 0), MASKS[mask], SCALE)
    return tuple(x.nan_to_num(0.0) for x in answer)


def worst(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(relative L2 of the worst chunk, largest difference over the largest value).

    Chunk by chunk, since a wrong short stretch would drown in the norm of the whole. A chunk whose true
    value is next to nothing is measured against a hundredth of the tensor's mean chunk.
    """
    got = got.double()
    floor = 0.01 * want.norm() / CHUNKS**0.5
    pairs = zip(got.chunk(CHUNKS, 1), want.chunk(CHUNKS, 1), strict=True)
    l2 = max(((part - reference).norm() / max(reference.norm(), floor)).item() for part, reference in pairs)
    return l2, ((got - want).abs().max() / want.abs().max()).item()


SIZES = [1, 2, 3, 4]
Run = tuple[str, str, int, str, str, str, torch.dtype]  # strategy, layout, size, mask, heads, dims, dtype


def shapes(dtype: torch.dtype) -> list[tuple[str, str]]:
    """(heads, dims) of the grid: every dim with one head shape in fp64, else one dim."""
    return [
        (heads, dims)
        for heads in HEADS
        for dims in (GRID_DIMS if heads == "GQA 4:1" and dtype == torch.float64 else ["16/16"])
    ]


@cache
def default_runs() -> frozenset[Run]:
    """400 of the grid's 10,400 runs that hold every pair of values of two factors.

    Each (strategy, layout, mask, dtype) stands once, with the size, heads and dims that add the most new pairs.
    """
    chosen: list[Run] = []
    seen: set[tuple[int, Any, int, Any]] = set()
    for strategy, layout, mask, dtype in itertools.product(ALL_STRATEGIES, LAYOUTS, MASKS, DTYPES):
        candidates = [
            (strategy, layout, size, mask, heads, dims, dtype) for size in SIZES for heads, dims in shapes(dtype)
        ]
        best = max(candidates, key=lambda run: len(pairs_of(run) - seen))
        chosen.append(best)
        seen |= pairs_of(best)
    return frozenset(chosen)


def pairs_of(run: Run) -> set[tuple[int, Any, int, Any]]:
    return {(i, run[i], j, run[j]) for i, j in itertools.combinations(range(len(run)), 2)}


def test_the_default_runs_hold_every_pair_of_the_grid() -> None:
    grid = {
        (strategy, layout, size, mask, heads, dims, dtype)
        for strategy, layout, size, mask, dtype in itertools.product(ALL_STRATEGIES, LAYOUTS, SIZES, MASKS, DTYPES)
        for heads, dims in shapes(dtype)
    }
    assert len(grid) == 10_400
    assert len(default_runs()) == 400
    assert set.union(*map(pairs_of, grid)) == set.union(*map(pairs_of, default_runs()))


def in_third(run: Run) -> bool:
    """A third of the grid, in which any values of all other factors meet with some mask."""
    factors = map(list[Any], (ALL_STRATEGIES, LAYOUTS, SIZES, MASKS, HEADS, GRID_DIMS))
    return sum(values.index(value) for values, value in zip(factors, run, strict=False)) % 3 == 0


@pytest.mark.parametrize("chosen", ["default", pytest.param("third", marks=pytest.mark.deep)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_every_mask_head_shape_and_dim_equals_the_full_sequence(
    ranks: Callable[[int], RankPool], strategy: str, layout: str, size: int, chosen: str
) -> None:
    grid: list[Run] = [
        (strategy, layout, size, mask, heads, dims, dtype)
        for mask, dtype in itertools.product(MASKS, DTYPES)
        for heads, dims in shapes(dtype)
    ]
    if chosen == "default":
        cases: list[Case] = [run[3:] for run in grid if run in default_runs()]
    else:  # fp32 runs the same code
        cases = [run[3:] for run in grid if run[6] == torch.float64 and in_third(run) and run not in default_runs()]
    answers = ranks(size)(run_cases, strategy, layout, cases)[0]
    for case, answer in zip(cases, answers, strict=True):
        check_answer(case, answer)


def check_answer(case: Case, answer: list[Tensor]) -> None:
    l2, largest = (1e-10, 1e-10) if case[3] == torch.float64 else (1e-5, 2e-5)
    for name, got, want in zip(NAMES, answer, expected(*case), strict=True):
        assert got.isfinite().all(), (case, name)
        # Documents of length 1: the true dq and dk are 0, and what is left is rounding of their terms.
        if case[0] == "documents of length 1" and name in ("dq", "dk"):
            assert got.abs().max() < l2, (case, name)
            continue
        error = worst(got, want)
        assert error[0] < l2, (case, name, error)
        assert error[1] < largest, (case, name, error)


@cache
def emulated_runs(size: int) -> tuple[tuple[str, str, Case], ...]:
    """(strategy, layout, case) of the default runs, all in fp64.

    Most of the default runs are of one rank, which merges little. On several, a third of these are run as well.
    """
    runs = {
        ranks: sorted(
            {(run[0], run[1], (*run[3:6], torch.float64)) for run in default_runs() if run[2] == ranks}, key=repr
        )
        for ranks in (1, size)
    }
    return tuple(runs[1]) if size == 1 else (*runs[size], *runs[1][size - 2 :: 3])


def run_emulated(kernel: str) -> tuple[list[list[Tensor]], int]:
    """The answers of a CUDA kernel's own code over emulated operators, and how many calls these had."""
    with emulate() as calls:
        answers = []
        for strategy, layout, case in emulated_runs(dist.get_world_size()):
            answers += run_cases(strategy, layout, [case], kernel)
    return answers, calls.total()


@deep_rows(("kernel", "size"), itertools.product(EMULATED, SIZES), default=[("flash", 2)])
def test_the_code_of_cuda_kernels_over_emulated_operators_equals_the_full_sequence(
    ranks: Callable[[int], RankPool], kernel: str, size: int
) -> None:
    results = ranks(size)(run_emulated, kernel)
    assert all(calls for _, calls in results)
    for (_, _, case), answer in zip(emulated_runs(size), results[0][0], strict=True):
        check_answer(case, answer)


def run_extreme(strategy: str) -> list[Tensor]:
    """Logits of about +-60, and keys whose scale differs by rank."""
    return run(make_cp(strategy, "zigzag"), extreme_inputs(torch.float64), AttentionMask())


def extreme_inputs(dtype: torch.dtype) -> list[Tensor]:
    q, k, v, dout = inputs("GQA 4:1", "16/16", dtype)
    # Scores are scale * q.k with |q.k| of about 4: 50 brings them to 60.
    k = k * torch.logspace(-2, 0, 8, dtype=dtype).repeat_interleave(S // 8)[None, :, None, None]
    return [q * 50, k, v, dout]


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_large_logits_and_keys_whose_scale_differs_by_rank(ranks: Callable[[int], RankPool], strategy: str) -> None:
    tensors = extreme_inputs(torch.float64)
    scores = torch.einsum("bqhd,bkhd->bhqk", tensors[0][:, :, ::4], tensors[1]) * SCALE
    assert scores.abs().max() > 60
    want = attention_with_gradients(*tensors, AttentionMask(), SCALE)
    for got, reference in zip(ranks(4)(run_extreme, strategy)[0], want, strict=True):
        assert worst(got, reference)[0] < 1e-10


def run_sinks(strategy: str, mask: str, dtype: torch.dtype, kernel: str = "auto") -> list[Tensor]:
    tensors = inputs("6 heads of 2", "16/16", dtype)
    return run(make_cp(strategy, "balanced", kernel), tensors, MASKS[mask], sink_logits())


def sink_logits() -> Tensor:
    return torch.tensor([-4.0, 4.0, 0.0, 4.0, -1.0, 2.0], dtype=torch.float64, device=rank_device())


@pytest.mark.parametrize("mask", ["causal", "documents with gaps", "window"])
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_sinks_take_their_share_of_the_softmax_and_have_gradients(
    ranks: Callable[[int], RankPool], strategy: str, mask: str
) -> None:
    check_sinks(ranks(4)(run_sinks, strategy, mask, torch.float64), mask)


def check_sinks(answers: list[list[Tensor]], mask: str) -> None:
    q, k, v, dout = inputs("6 heads of 2", "16/16", torch.float64)
    dout = torch.where(allowed(MASKS[mask], S).any(-1)[:, :, None, None], dout, 0)
    *want, dsinks = attention_with_sinks(q, k, v, dout, sink_logits(), MASKS[mask], SCALE)
    for got, reference in zip(answers[0], want, strict=False):
        assert worst(got, reference)[0] < 1e-10
    summed = torch.stack([answer[4] for answer in answers]).sum(0)
    assert (summed - dsinks).norm() < 1e-10 * dsinks.norm()


def run_bf16(strategy: str, layout: str, mask: str) -> list[Tensor]:
    return run(make_cp(strategy, layout), inputs("GQA 4:1", "16/16", torch.bfloat16, 256), bf16_mask(mask))


def bf16_mask(name: str) -> AttentionMask:
    return {"causal": AttentionMask(), "documents": AttentionMask(document_lengths=((30, 1, 131, 94),))}[name]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_error_is_no_worse_than_one_process_sdpa_and_does_not_grow_with_ranks(
    ranks: Callable[[int], RankPool], strategy: str, mask: str, size: int
) -> None:
    tensors = inputs("GQA 4:1", "16/16", torch.bfloat16, 256)
    want = attention_with_gradients(*tensors, bf16_mask(mask), SCALE)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3]]
    bias = torch.zeros(256, 256, dtype=torch.bfloat16).masked_fill(~allowed(bf16_mask(mask), 256)[0], float("-inf"))
    out = F.scaled_dot_product_attention(*leaves, attn_mask=bias, scale=SCALE, enable_gqa=True)
    out.backward(tensors[3].transpose(1, 2))
    alone = [x.transpose(1, 2) for x in (out.detach(), *(leaf.grad for leaf in leaves))]  # type: ignore[union-attr]
    answers = ranks(size)(run_bf16, strategy, "zigzag", mask)[0]
    for name, got, single, reference in zip(NAMES, answers, alone, want, strict=True):
        errors = [((x.double() - reference).norm() / reference.norm()).item() for x in (got, single)]
        assert errors[0] <= 1.5 * errors[1], (name, errors)


def uneven_bf16_inputs(factor: float) -> list[Tensor]:
    """Queries times `factor`, and keys whose scale halves from each quarter of the sequence to the next."""
    q, k, v, dout = inputs("GQA 4:1", "32/32", torch.float64, 192)
    k = k * (0.5 ** torch.arange(4, dtype=torch.float64)).repeat_interleave(48)[None, :, None, None]
    return [x.bfloat16() for x in (q * factor, k, v, dout)]


def run_uneven_bf16(strategy: str, factor: float) -> list[Tensor]:
    return run(make_cp(strategy, "zigzag"), uneven_bf16_inputs(factor), AttentionMask())


@pytest.mark.parametrize("factor", [3.0, 10.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_error_stays_near_one_process_where_the_scale_of_keys_differs_by_rank(
    ranks: Callable[[int], RankPool], strategy: str, factor: float
) -> None:
    tensors = uneven_bf16_inputs(factor)
    want = attention_with_gradients(*tensors, AttentionMask(), SCALE)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE, enable_gqa=True)
    out.backward(tensors[3].transpose(1, 2))
    alone = [x.transpose(1, 2) for x in (out.detach(), *(leaf.grad for leaf in leaves))]  # type: ignore[union-attr]
    answers = ranks(4)(run_uneven_bf16, strategy, factor)[0]
    for name, got, single, reference in zip(NAMES, answers, alone, want, strict=True):
        whole = (got - reference).norm() / (single - reference).norm()
        split = (x.double().chunk(CHUNKS, 1) for x in (got, single, reference))
        chunks = [
            ((ours - exact).norm() / (theirs - exact).norm()).item() for ours, theirs, exact in zip(*split, strict=True)
        ]
        # Each tile's output was rounded to bf16 before it was merged: 1.3 of the whole, 3.5 of one chunk of dk.
        assert whole < (1.25 if name == "dv" else 1.15), (name, whole)
        assert max(chunks) < 1.5, (name, chunks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_runs_are_bitwise_equal(ranks: Callable[[int], RankPool], strategy: str) -> None:
    case = ("documents", "GQA 4:1", "16/16", torch.float32)
    runs = [ranks(4)(run_cases, strategy, "balanced", [case])[0][0] for _ in range(10)]
    for again in runs[1:]:
        for one, other in zip(runs[0], again, strict=True):
            assert torch.equal(one, other)


def test_reference_kernel_equals_the_full_sequence_on_ranks(ranks: Callable[[int], RankPool]) -> None:
    cases: list[Case] = [(mask, "GQA 4:1", "128/64", torch.float64) for mask in MASKS]
    for case, answer in zip(cases, ranks(2)(run_cases, "ring", "zigzag", cases, "reference")[0], strict=True):
        for got, want in zip(answer, expected(*case), strict=True):
            assert (got - want).norm() <= 1e-10 * max(want.norm(), 1)


GAPS = AttentionMask.from_cu_seqlens([0, 5, 45, 76], [0, 8, 48, 96])


def run_garbage(strategy: str, dtype: torch.dtype, kernel: str = "auto") -> list[Tensor]:
    """Padding rows hold NaN in q, k, v and dout; one row in the storage that TransformerEngine calls thd."""
    tensors = inputs("GQA 4:1", "16/16", dtype)
    padding = ~allowed(GAPS, S)[0].any(-1).to(rank_device())
    q, k, v, dout = (x[0].masked_fill(padding[:, None, None], float("nan")) for x in tensors)
    cp = make_cp(strategy, "balanced", kernel)
    plan = cp.plan(S, GAPS)
    local = [plan.shard(x, dim=0).requires_grad_() for x in (q, k, v)]
    sinks = torch.zeros(8, dtype=dtype, device=rank_device(), requires_grad=True)
    out = cp.attention(*local, plan, scale=SCALE, sinks=sinks, qkv_format="thd")
    out.backward(plan.shard(dout, dim=0))
    gradients = [x.grad for x in local]
    return [*(plan.unshard(x, dim=0) for x in (out.detach(), *gradients)), sinks.grad]  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_padding_rows_give_exact_zeros_whatever_they_hold(ranks: Callable[[int], RankPool], strategy: str) -> None:
    check_garbage(ranks(4)(run_garbage, strategy, torch.float64))


def run_over_stand_ins(function: Callable[..., Any], *arguments: Any) -> Any:
    with emulate() as calls:
        answer = function(*arguments)
    assert calls
    return answer


@deep_rows(("kernel", "strategy"), itertools.product(EMULATED, ALL_STRATEGIES), default=[("flash", "ring")])
def test_sinks_and_padding_over_emulated_operators(
    ranks: Callable[[int], RankPool], kernel: str, strategy: str
) -> None:
    for mask in ("documents with gaps", "window"):
        check_sinks(ranks(4)(run_over_stand_ins, run_sinks, strategy, mask, torch.float64, kernel), mask)
    check_garbage(ranks(4)(run_over_stand_ins, run_garbage, strategy, torch.float64, kernel))


def check_garbage(answers: list[list[Tensor]]) -> None:
    padding = ~allowed(GAPS, S)[0].any(-1)
    for answer in answers:
        for x in answer[:4]:
            assert x[padding].abs().max() == 0
            assert x.isfinite().all()
        assert answer[4].isfinite().all()


def run_formats() -> list[bool]:
    cp = make_cp("ring", "zigzag")
    q, k, v, _ = inputs("GQA 4:1", "16/16", torch.float32)
    plan = cp.plan(S)
    local = [plan.shard(x) for x in (q, k, v)]
    out = cp.attention(*local, plan)
    other = cp.attention(*(x.transpose(0, 1) for x in local), plan, qkv_format="sbhd").transpose(0, 1)
    packed = cp.attention(*(x[0] for x in local), plan, qkv_format="thd")
    return [torch.equal(out, other), torch.allclose(out[0], packed, rtol=0, atol=1e-6)]


def test_qkv_formats_are_one_attention(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(run_formats) == [[True, True]] * 2


def run_float8(strategy: str) -> list[Tensor]:
    tensors = inputs("GQA 4:1", "32/16", torch.float32)
    return run(make_cp(strategy, "zigzag", "auto", "float8"), tensors, MASKS["documents"])


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "hybrid"])
def test_float8_transfer_costs_the_precision_of_its_mantissa_and_no_more(
    ranks: Callable[[int], RankPool], strategy: str
) -> None:
    want = expected("documents", "GQA 4:1", "32/16", torch.float32)
    answers = ranks(4)(run_float8, strategy)[0]
    errors = [
        ((got - reference).norm() / reference.norm()).item() for got, reference in zip(answers, want, strict=True)
    ]
    # e4m3 has 3 bits of mantissa: a rounding of at most 2**-4, about 0.027 of a value in the root mean square.
    assert 1e-4 < max(errors) < 0.06, errors


def run_idle_rank() -> list[float]:
    """Documents that never leave a rank: no key travels; every rank still answers."""
    cp = make_cp("ring", "contiguous")
    plan = cp.plan(64, AttentionMask(document_lengths=((16, 16, 16, 16),)))
    assert not any(step.receive or step.send for step in plan.steps[1:])
    q = torch.randn(1, 16, 2, 8, device=rank_device(), requires_grad=True)
    cp.attention(q, q, q, plan).sum().backward()
    assert q.grad is not None
    return [q.grad.isfinite().all().item()]


def test_ranks_with_nothing_to_exchange_finish(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4)(run_idle_rank) == [[True]] * 4


def run_nothing_to_attend() -> list[Tensor]:
    """The last rank holds padding only."""
    cp = make_cp("ring", "contiguous")
    plan = cp.plan(64, AttentionMask.from_cu_seqlens([0, 40], [0, 64]))
    leaf = torch.randn(1, 16, 2, 8, device=rank_device(), requires_grad=True)
    out = cp.attention(leaf, leaf, leaf, plan)
    out.sum().backward()
    return [out.detach(), leaf.grad]  # type: ignore[list-item]


def test_a_rank_with_nothing_to_attend_gives_zeros_and_zero_gradients(ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(4)(run_nothing_to_attend)
    assert all(x.abs().max() == 0 for x in answers[3])
    assert all(x.isfinite().all() for answer in answers for x in answer)


def run_empty_batch(strategy: str) -> list[Any]:
    """A micro-batch without sequences: nothing to compute and nothing to send."""
    cp = make_cp(strategy, "zigzag")
    sinks = torch.zeros(4, device=rank_device(), requires_grad=True)
    shapes = []
    for mask in ("causal", "documents"):
        plan = cp.plan(S, MASKS[mask])
        q, k, v = (torch.zeros(0, S // 4, *shape, device=rank_device()) for shape in ((4, 8), (2, 8), (2, 16)))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = cp.attention(*leaves, plan, sinks=sinks)
        out.sum().backward()
        shapes += [out.shape, *(x.grad.shape for x in leaves), sinks.grad.tolist()]  # type: ignore[union-attr]
    return shapes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_batch_gives_empty_tensors(ranks: Callable[[int], RankPool], strategy: str) -> None:
    shapes = [(0, 24, 4, 16), (0, 24, 4, 8), (0, 24, 2, 8), (0, 24, 2, 16)]
    want = [*shapes, [0.0] * 4] * 2
    assert ranks(4)(run_empty_batch, strategy) == [want] * 4


def show_arguments() -> tuple[Any, ...]:
    cp = ContextParallel(init_device_mesh("cpu", (1, 2)), kernel="reference")
    return cp.mesh.shape, cp.strategy, cp.kernel, cp.layout, cp.kv_transfer


def test_a_context_parallel_shows_its_arguments(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(show_arguments) == [((1, 2), "hybrid", "reference", "auto", "exact")] * 2


def run_refusals() -> list[str]:
    cp = make_cp("ring", "zigzag")
    plan, q = cp.plan(64), torch.zeros(1, 32, 2, 8)
    calls = [
        lambda: cp.attention(torch.zeros(1, 64, 2, 8), q, q, plan),
        lambda: cp.attention(q, q[:, :, :, :4], q, plan),
        lambda: cp.attention(q, q.double(), q, plan),
        lambda: cp.attention(q, q, q, plan, sinks=torch.zeros(3)),
        lambda: cp.attention(q, q, q, plan, qkv_format="bhsd"),
        lambda: cp.attention(q, q, q, make_cp("ring", "zigzag", "flash").plan(64)),
        lambda: ContextParallel(init_device_mesh("cpu", (1, 2)), strategy="ring"),
        lambda: ContextParallel(init_device_mesh("cpu", (2,)), strategy="hybrid"),
        lambda: ContextParallel(DeviceMesh("cpu", [1, 0])),
        lambda: make_cp("ring", "zig"),
        lambda: ContextParallel(DeviceMesh("cpu", [1])),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except ContextParallelError as error:
            messages.append(str(error))
    return messages


def test_calls_that_do_not_fit_are_refused_with_what_would(ranks: Callable[[int], RankPool]) -> None:
    messages = ranks(2)(run_refusals)[0]
    assert "the plan holds 32 tokens a rank" in messages[0]
    assert "batch, heads or dims do not match" in messages[1]
    assert "dtypes differ" in messages[2]
    assert "give one number per query head: 2" in messages[3]
    assert "qkv_format 'bhsd' is not available; use one of bshd, sbhd, thd" in messages[4]
    assert "kernel 'flash' cannot run this: it runs on cuda, not cpu; use cpu or reference" in messages[5]
    assert "the mesh has 2 axes and the strategy is 'ring'" in messages[6]
    assert "for hybrid a 2-D one" in messages[7]
    assert "ranks do not ascend along an axis of the mesh" in messages[8]
    assert "layout 'zig' is not available; use one of auto, contiguous" in messages[9]
    assert "this rank is not in the mesh" in messages[10]


def run_unshard_gradient() -> Tensor:
    """A loss of the full tensor, the same on every rank."""
    plan = make_cp("hybrid", "zigzag").plan(8)
    full = torch.arange(8.0, device=rank_device())[None]
    local = plan.shard(full).requires_grad_()
    assert torch.equal(plan.unshard(local), full)
    assert torch.equal(plan.unshard(torch.stack([local, local], -1)[..., 0]), full), "rows apart in memory"
    (plan.unshard(local) * full).sum().backward()
    assert local.grad is not None
    return plan.unshard(local.grad)


@pytest.mark.parametrize("size", [2, 4])
def test_unshard_inverts_shard_and_its_gradient_is_the_rows_own(ranks: Callable[[int], RankPool], size: int) -> None:
    for gradient in ranks(size)(run_unshard_gradient):
        assert torch.equal(gradient, torch.arange(8.0)[None])


def run_layers() -> list[bool]:
    """A window layer by ring and a global layer by all-to-all, on one layout."""
    tensors = inputs("GQA 4:1", "16/16", torch.float64)
    ring, all_to_all_group = make_cp("ring", "balanced"), make_cp("all_to_all", "zigzag")
    mask = AttentionMask(document_lengths=((30, 66),))
    packed = ring.plan(S, mask)
    plans = [ring.plan(S, replace(mask, window=(9, -1)), like=packed), all_to_all_group.plan(S, mask, like=packed)]
    same = []
    for cp, plan in zip((ring, all_to_all_group), plans, strict=True):
        assert plan.layout == packed.layout
        out = plan.unshard(cp.attention(*(plan.shard(x) for x in tensors[:3]), plan, scale=SCALE)).cpu()
        want = attention_with_gradients(*(x.cpu() for x in tensors), plan.mask, SCALE)[0]
        same.append(((out - want).norm() < 1e-10 * want.norm()).item())
    return same


def test_layers_of_one_model_may_differ_in_mask_and_strategy_on_one_layout(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(run_layers) == [[True, True]] * 2


def run_other_neighbours(strategy: str) -> list[float]:
    """The same plan on pairs of neighbours, then on pairs of ranks two apart: nothing of the first may be kept."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("outer", "inner"))
    pair = dist.get_rank()
    errors = []
    for axis, number in (("inner", pair // 2), ("outer", pair % 2)):
        cp = ContextParallel(mesh[axis], strategy)
        tensors = [x + number for x in inputs("GQA 4:1", "16/16", torch.float64)]
        got = run(cp, tensors, MASKS["causal"])[0].cpu()
        want = attention_with_gradients(*(x.cpu() for x in tensors), MASKS["causal"], SCALE)[0]
        errors.append(((got - want).norm() / want.norm()).item())
    return errors


@pytest.mark.parametrize("strategy", ["auto", "ring", "all_gather", "all_to_all"])
def test_equal_plans_on_other_ranks_do_not_share_groups(ranks: Callable[[int], RankPool], strategy: str) -> None:
    for errors in ranks(4)(run_other_neighbours, strategy):
        assert max(errors) < 1e-10


def run_softcap(strategy: str) -> list[Tensor]:
    cp = make_cp(strategy, "balanced")
    q, k, v, dout = inputs("GQA 4:1", "16/16", torch.float64)
    plan = cp.plan(S, MASKS["documents"])
    local = [plan.shard(x).detach().requires_grad_() for x in (q, k, v)]
    out = cp.attention(*local, plan, scale=SCALE, softcap=1.5)
    out.backward(plan.shard(dout))
    return [plan.unshard(x) for x in (out.detach(), *(x.grad for x in local))]  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_a_soft_cap_bends_the_scores_before_the_mask(ranks: Callable[[int], RankPool], strategy: str) -> None:
    leaves = [x.requires_grad_() for x in inputs("GQA 4:1", "16/16", torch.float64)[:3]]
    q, k, v = leaves
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(4, 2)) * SCALE
    hidden = ~allowed(MASKS["documents"], S)[:, None]
    weights = (1.5 * torch.tanh(scores / 1.5)).masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(4, 2))
    out.backward(inputs("GQA 4:1", "16/16", torch.float64)[3])
    want = [out.detach(), *(leaf.grad for leaf in leaves)]
    for got, reference in zip(ranks(2)(run_softcap, strategy)[0], want, strict=True):
        assert worst(got, reference)[0] < 1e-10  # type: ignore[arg-type]


def refuse_softcap() -> str:
    cp = make_cp("ring", "zigzag", "cpu")
    q = torch.zeros(1, S // 2, 2, 8)
    with pytest.raises(PlanError) as error:
        cp.attention(q, q, q, cp.plan(S), softcap=2.0)
    return str(error.value)


def test_a_kernel_without_a_soft_cap_is_refused_by_name(ranks: Callable[[int], RankPool]) -> None:
    assert "kernel 'cpu' cannot run this: it has no logit soft-cap; use reference" in ranks(2)(refuse_softcap)[0]
