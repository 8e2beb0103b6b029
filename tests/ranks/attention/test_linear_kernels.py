"""Other kernels and rules of layers with a state: Mamba-2's scan, heads in parts, flash-linear-attention's functions.

flash-linear-attention needs a GPU, so a stand-in with its signature and documented semantics takes its place.
"""

import itertools
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.deep import deep_rows
from tests.support.linear_cases import (
    BATCH,
    LONG,
    LONG_MASK,
    MASKS,
    Case,
    S,
    check,
    convolution_inputs,
    convolve_on_rank,
    count_bytes,
    expected,
    expected_convolution,
    inputs,
    long_answers,
    make_cp,
    on_rank,
    run_long,
    stand_in,
    with_gradients,
)
from tests.support.rank_pool import RankPool
from tests.support.recurrence import first_and_used
from torchtitan_cp.attention import (
    AttentionMask,
    ContextParallel,
    Plan,
    PlanError,
    make_plan,
    selective_scan,
    sum_ranks,
)
from torchtitan_cp.attention.layouts import LAYOUTS
from torchtitan_cp.attention.linear import flash_linear, kernel

HEADS, GROUPS, STATE, DIM = 4, 2, 8, 6


def scan_token_by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: AttentionMask) -> Tensor:
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    first, used = first_and_used(mask, *x.shape[:2])
    state, out = x.new_zeros(len(x), x.shape[2], B.shape[-1], x.shape[-1]), []
    for token in range(x.shape[1]):
        step = dt[:, token, :, None, None]
        decayed = (step * A[:, None, None]).exp() * state.masked_fill(first[:, token, None, None, None], 0)
        state = decayed + step * B[:, token, :, :, None] * x[:, token, :, None]
        out.append((C[:, token, :, :, None] * state).sum(2))
    return torch.stack(out, 1).masked_fill(~used[..., None, None], 0)


def scan_inputs(length: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, A, B, C and dout; heads forget at different rates."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(HEADS, DIM), (HEADS,), (GROUPS, STATE), (GROUPS, STATE), (HEADS, DIM)]
    x, dt, B, C, dout = (
        torch.randn(BATCH, length, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    inputs = [x, dt.abs(), -torch.linspace(0.01, 3.0, HEADS, dtype=torch.float64), B, C, dout]
    return [y.to(dtype) for y in inputs]


def scan_on_rank(plan: Plan, strategy: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The gathered out and gradients, that of A summed over the ranks."""
    x, dt, A, B, C, dout = scan_inputs(plan.sequence_length, dtype)
    local = [plan.shard(x), plan.shard(dt), A, plan.shard(B), plan.shard(C)]
    answers = with_gradients(lambda *y: selective_scan(*y, plan, strategy), local, plan.shard(dout))
    # Summed in fp64, so that only each rank's own rounding counts.
    return [sum_ranks(y.to(torch.float64), plan) if n == 3 else plan.unshard(y) for n, y in enumerate(answers)]


def run_scans(layout: str, strategy: str) -> dict[str, list[Tensor]]:
    found = {name: scan_on_rank(make_cp(layout).plan(S, mask), strategy) for name, mask in MASKS.items()}
    return found if dist.get_rank() == 0 else {}


@cache
def expected_scan(mask: AttentionMask, length: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The recurrence's answer in fp64 to inputs as `dtype` holds them."""
    *leaves, dout = (y.double() for y in scan_inputs(length, dtype))
    return with_gradients(lambda *y: scan_token_by_token(*y, mask), leaves, dout)


@deep_rows("size", [1, 2, 3, 4], default=[1, 3])
def test_a_scan_equals_token_by_token(ranks: Callable[[int], RankPool], size: int) -> None:
    runs = itertools.product(LAYOUTS, ("state", "all_to_all")) if size > 1 else [("contiguous", "state")]
    for layout, strategy in runs:
        for name, answers in ranks(size)(run_scans, layout, strategy)[0].items():
            check(answers, expected_scan(MASKS[name]), 1e-10, (layout, strategy, name))


def run_long_scan(layout: str, strategy: str, dtype: torch.dtype) -> list[Tensor]:
    return scan_on_rank(make_cp(layout).plan(LONG, LONG_MASK), strategy, dtype)


@pytest.mark.parametrize(("strategy", "layout"), [("state", "zigzag"), ("all_to_all", "contiguous")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_error_of_a_scan_over_many_chunks_and_segments_is_that_of_one_process(
    ranks: Callable[[int], RankPool], dtype: torch.dtype, strategy: str, layout: str
) -> None:
    want, plan = expected_scan(LONG_MASK, LONG, dtype), make_plan(LONG, mask=LONG_MASK)
    *leaves, dout = scan_inputs(LONG, dtype)
    alone = with_gradients(lambda *y: selective_scan(*y, plan), leaves, dout)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    answers = ranks(3)(run_long_scan, layout, strategy, dtype)[0]
    for got, single, reference in zip(answers, alone, want, strict=True):
        error, norm = (got - reference).norm(), reference.norm()
        assert error < min(tolerance * norm, 1.5 * (single - reference).norm() + 1e-7 * norm)


def run_counted_scan(strategy: str, mask: AttentionMask) -> tuple[int, int]:
    """Bytes forward and backward of a scan in bf16."""
    plan, outs = make_cp("contiguous").plan(S, mask), list[Tensor]()
    x, dt, A, B, C, _ = scan_inputs(S, torch.bfloat16)
    leaves = [y.requires_grad_() for y in (plan.shard(x), plan.shard(dt), A, plan.shard(B), plan.shard(C))]
    forward = count_bytes(lambda: outs.append(selective_scan(*leaves, plan, strategy)))
    return forward, count_bytes(lambda: outs[0].sum().backward())


def test_a_scan_sends_what_the_formulas_say(ranks: Callable[[int], RankPool]) -> None:
    """A state is N x D in fp32 for each head and batch row, and A a column of N."""
    state, column = (4 * BATCH * HEADS * STATE * columns for columns in (DIM, 1))
    # Of four segments the first sends B, the two inner ones A and B, and all but the first get a state.
    answers = ranks(4)(run_counted_scan, "state", AttentionMask())
    assert sum(answer[0] for answer in answers) == ((3 + 3) * state + 2 * column) * 3 // 4
    assert sum(answer[1] for answer in answers) == (3 + 3) * state * 3 // 4
    whole = AttentionMask(document_lengths=((12, 12, 5, 7, 12),))
    assert ranks(4)(run_counted_scan, "state", whole) == [(0, 0)] * 4
    # In trade, x, B, C and out in bf16, and the gates in fp32 beside step sizes in bf16, each way.
    a_token = 2 * (2 * HEADS * DIM + 2 * GROUPS * STATE) + (4 + 2) * HEADS
    assert ranks(2)(run_counted_scan, "all_to_all", AttentionMask()) == [(BATCH * S // 2 * a_token // 2,) * 2] * 2


def run_in_parts(rule: str) -> list[Tensor]:
    whole, kernel.PART = kernel.PART, 1
    try:
        return run_long(1, torch.float64, rule, "state", "zigzag")
    finally:
        kernel.PART = whole


@pytest.mark.parametrize("rule", ["GDN", "KDA"])
def test_heads_in_parts_give_what_all_of_them_give(ranks: Callable[[int], RankPool], rule: str) -> None:
    check(ranks(3)(run_in_parts, rule)[0], long_answers(torch.float64, rule, True), 1e-10, rule)


def run_stand_in(rule: str, layout: str, l2norm: bool) -> dict[str, list[Tensor]]:
    before: Any = flash_linear.is_available, flash_linear.find_rules
    flash_linear.is_available = lambda inputs, plan: bool(flash_linear.local_segments(plan))
    flash_linear.find_rules = lambda: (stand_in, stand_in)  # type: ignore[assignment]
    cases = {
        name: Case(name, "4 of 4" if l2norm else "8 of 2", rule, "soft", "between", l2norm, torch.float64)
        for name in MASKS
    }
    try:
        found = {
            name: on_rank(make_cp(layout).plan(S, MASKS[name]), inputs(case), qk_l2norm=l2norm, strategy=strategy)
            for (name, case), strategy in zip(cases.items(), itertools.cycle(("state", "all_to_all")), strict=False)
        }
    finally:
        flash_linear.is_available, flash_linear.find_rules = before
    return found if dist.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("size", "rule", "layout", "l2norm"),
    [
        (1, "GDN", "contiguous", True),
        (2, "KDA", "zigzag", True),
        (3, "GDN", "zigzag", False),
        (4, "GDN", "balanced", True),
    ],
)
def test_the_fused_kernels_functions_are_called_as_they_say_and_give_the_recurrence(
    ranks: Callable[[int], RankPool], size: int, rule: str, layout: str, l2norm: bool
) -> None:
    for name, answers in ranks(size)(run_stand_in, rule, layout, l2norm)[0].items():
        heads = "4 of 4" if l2norm else "8 of 2"
        want = expected(Case(name, heads, rule, "soft", "between", l2norm, torch.float64))
        check(answers, want, 1e-10, (size, rule, layout, name))


def test_without_the_package_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(flash_linear.importlib, "import_module", missing)
    flash_linear.find_rules.cache_clear()
    with caplog.at_level(logging.INFO):
        assert flash_linear.find_rules() is None is flash_linear.find_rules()
    flash_linear.find_rules.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "linear attention runs in torch, which is slower: no flash-linear-attention "
        "(No module named 'fla.ops.gated_delta_rule')"
    ]


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "right"),
    [
        ("3.6.0", (9, 0), None, False),
        ("3.4.0", (9, 0), None, False),
        ("3.3.1", (9, 0), None, True),
        ("3.7.0+git1", (9, 0), None, False),
        ("3.7.1", (9, 0), None, True),
        ("3.6.0", (8, 0), None, True),
        ("3.6.0", (9, 0), "found", True),
        ("3.10.0", (9, 0), None, True),
    ],
)
def test_the_fused_backward_is_left_alone_where_triton_compiles_it_wrongly(
    triton: str,
    capability: tuple[int, int],
    tilelang: str | None,
    right: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flash_linear, "version", lambda package: triton)
    monkeypatch.setattr(flash_linear, "find_spec", lambda package: tilelang)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    flash_linear.has_right_backward.cache_clear()
    assert flash_linear.has_right_backward() is right
    assert ("pip install 'triton>=3.7.1'" in caplog.text) is not right
    flash_linear.has_right_backward.cache_clear()


CROSSING = AttentionMask(document_lengths=((7, 1, 25, 15),))
HYBRID = Case("packed", "4 of 4", "GDN", "soft", "between", True, torch.float64)


def run_hybrid(layout: str) -> list[list[Tensor]]:
    mesh, whole = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    plan = ContextParallel(mesh, "hybrid", layout=layout, whole_mesh=whole).plan(S, CROSSING)
    rules = [on_rank(plan, inputs(HYBRID), qk_l2norm=True, strategy=strategy) for strategy in ("state", "all_to_all")]
    return [*rules, convolve_on_rank(plan, convolution_inputs(4, torch.float64), True, "silu")]


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_states_and_halos_cross_a_mesh_of_two_axes(ranks: Callable[[int], RankPool], layout: str) -> None:
    *rules, convolved = ranks(4)(run_hybrid, layout)[0]
    for answers in rules:
        check(answers, expected(HYBRID), 1e-10, layout)
    check(convolved, expected_convolution(CROSSING, convolution_inputs(4, torch.float64), True, "silu"), 1e-10, layout)


def run_two_axes() -> list[str]:
    """A 2-D mesh of one rank on an axis is one group; of several on both it is none."""
    q, dt = torch.randn(1, 16, 2, 8), torch.ones(1, 16, 2)
    whole = ContextParallel(init_device_mesh("cpu", (1, 4)), "hybrid").plan(64)
    assert selective_scan(q, dt, -dt[0, 0], q, q, whole).shape == q.shape
    with pytest.raises(PlanError) as error:
        selective_scan(q, dt, -dt[0, 0], q, q, ContextParallel(init_device_mesh("cpu", (2, 2)), "hybrid").plan(64))
    other_order = DeviceMesh("cpu", [[0, 2], [1, 3]])
    with pytest.raises(PlanError) as of_order:
        ContextParallel(other_order, "hybrid", whole_mesh=init_device_mesh("cpu", (4,)))
    return [str(error.value), str(of_order.value)]


def test_a_mesh_of_two_axes_alone_or_with_another_order_is_refused_by_name(ranks: Callable[[int], RankPool]) -> None:
    alone, other_order = ranks(4)(run_two_axes)[0]
    assert "two axes; give ContextParallel the same ranks as a 1-D mesh too" in alone
    assert "or whole_mesh has others: DeviceMesh(" in other_order
