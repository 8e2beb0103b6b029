"""The gated delta rule and the short convolution on real ranks against token by token in fp64."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.linear_cases import (
    BATCH,
    HEADS,
    MASKS,
    SCALE,
    Case,
    S,
    check,
    convolution_inputs,
    convolve_on_rank,
    draw,
    expected,
    expected_convolution,
    inputs,
    long_answers,
    make_cp,
    on_rank,
    run_long,
    with_gradients,
)
from tests.support.rank_pool import RankPool
from tests.support.recurrence import delta_rule
from torchtitan_cp.attention import (
    AttentionMask,
    causal_conv,
    gated_delta_rule,
    make_plan,
)
from torchtitan_cp.attention.layout import Layout
from torchtitan_cp.attention.layouts import LAYOUTS

GATES = ("soft", "0", "-1e-9", "-800", "mixed")
BETAS = ("0", "1", "2", "between")
STRATEGIES = ("state", "all_to_all", "auto")
RULES = ("GDN", "KDA")
DTYPES = (torch.float64, torch.float32)
SIZES = (1, 2, 3, 4)


class Run(NamedTuple):
    """A case and how ranks compute it."""

    strategy: str
    layout: str
    size: int
    case: Case


def run_cases(strategy: str, layout: str, cases: list[Case]) -> list[list[Tensor]]:
    answers = []
    for case in cases:
        plan = make_cp(layout).plan(S, MASKS[case.mask])
        answers.append(on_rank(plan, inputs(case), qk_l2norm=case.l2norm, strategy=strategy))
    return answers if dist.get_rank() == 0 else []


FACTORS: list[list[Any]] = [
    list(values) for values in (STRATEGIES, LAYOUTS, SIZES, MASKS, HEADS, RULES, GATES, BETAS, (False, True), DTYPES)
]


@cache
def covering_runs(together: int) -> tuple[Run, ...]:
    """Runs that hold every choice of values for so many factors: of 20 drawn around a missing one, the most telling."""
    places = list(itertools.combinations(range(len(FACTORS)), together))
    choices = [(some, values) for some in places for values in itertools.product(*(FACTORS[place] for place in some))]
    missing, drawn, chosen = dict.fromkeys(choices), random.Random(1), []

    def draw_around(some: tuple[int, ...], values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        run = list(map(drawn.choice, FACTORS))
        for place, value in zip(some, values, strict=True):
            run[place] = value
        return [(held, tuple(run[place] for place in held)) for held in places] + [tuple(run)]

    while missing:
        candidates = [draw_around(*next(iter(missing))) for _ in range(20)]
        *held, best = max(candidates, key=lambda found: sum(choice in missing for choice in found[:-1]))
        for choice in held:
            missing.pop(choice, None)
        chosen.append(Run(*best[:3], Case(*best[3:])))
    return tuple(chosen)


@pytest.mark.parametrize("together", [2, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize("size", SIZES)
def test_every_mask_head_shape_gate_and_layout_equals_token_by_token(
    ranks: Callable[[int], RankPool], size: int, together: int
) -> None:
    runs = [run for run in covering_runs(together) if run.size == size]
    for strategy, layout in itertools.product(STRATEGIES, LAYOUTS):
        cases = [run.case for run in runs if run[:2] == (strategy, layout)]
        if not cases:
            continue
        for case, answers in zip(cases, ranks(size)(run_cases, strategy, layout, cases)[0], strict=True):
            tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
            check(answers, expected(case), tolerance, (strategy, layout, size, case))


ConvolutionCase = tuple[str, int, bool, str | None, torch.dtype]  # mask, width, bias, activation, dtype


def run_convolutions(layout: str, cases: list[ConvolutionCase]) -> list[list[Tensor]]:
    answers = []
    for mask, width, biased, activation, dtype in cases:
        plan = make_cp(layout).plan(S, MASKS[mask])
        answers.append(convolve_on_rank(plan, convolution_inputs(width, dtype), biased, activation))
    return answers if dist.get_rank() == 0 else []


@cache
def convolution_answers(case: ConvolutionCase) -> list[Tensor]:
    mask, width, biased, activation, dtype = case
    return expected_convolution(MASKS[mask], convolution_inputs(width, dtype), biased, activation)


@pytest.mark.parametrize("size", SIZES)
def test_a_convolution_reads_the_preceding_tokens_of_its_document_wherever_they_are(
    ranks: Callable[[int], RankPool], size: int
) -> None:
    options = itertools.cycle(itertools.product((4, 1, 7, 2), (True, False), ("silu", None), DTYPES))
    for layout in LAYOUTS:
        cases = [(mask, *values) for mask, values in zip(MASKS, options, strict=False)]
        for case, answers in zip(cases, ranks(size)(run_convolutions, layout, cases)[0], strict=True):
            tolerance = 1e-10 if case[-1] == torch.float64 else 1e-5
            check(answers, convolution_answers(case), tolerance, (layout, size, case))


def run_channels_first() -> Tensor:
    """The halo of a convolution of width 2 is one row: here of a tensor that lies in memory as nn.Conv1d takes it."""
    plan, x = make_cp("contiguous").plan(S), torch.arange(3.0 * S).view(1, 3, S)
    return plan.unshard(causal_conv(plan.shard(x, dim=2).mT, torch.ones(3, 2), plan))


def test_a_halo_of_one_row_travels_whatever_its_stride(ranks: Callable[[int], RankPool]) -> None:
    x = torch.arange(3.0 * S).view(1, 3, S)
    for out in ranks(2)(run_channels_first, timeout=60.0):
        assert torch.equal(out.mT, x + torch.nn.functional.pad(x, (1, 0))[..., :-1])


def scattered(drawn: random.Random, length: int, ranks: int) -> Layout:
    """Each rank holds as many tokens, in runs of 1 to 9 of them in any order."""
    left, held, start = [length // ranks] * ranks, [[] for _ in range(ranks)], 0  # type: ignore[var-annotated]
    while start < length:
        rank = drawn.choice([rank for rank in range(ranks) if left[rank]])
        taken = min(left[rank], drawn.randint(1, 9))
        held[rank].append((start, start + taken))
        left[rank], start = left[rank] - taken, start + taken
    return Layout.of(held)


def drawn_lengths(drawn: random.Random, length: int) -> tuple[int, ...]:
    lengths = []
    while (rest := length - sum(lengths)) > 0:
        lengths.append(min(rest, drawn.choice((1, 2, 3, 5, 13, 40, 90))))
    return tuple(lengths)


def drawn_mask(drawn: random.Random, length: int) -> AttentionMask:
    """One row or two, some with gaps."""
    rows = tuple(drawn_lengths(drawn, length) for _ in range(drawn.choice((1, BATCH))))
    used = tuple(tuple(drawn.choice((room, drawn.randint(0, room))) for room in lengths) for lengths in rows)
    return AttentionMask(document_lengths=rows, used_lengths=used if drawn.random() < 0.3 else None)


def run_drawn(seed: int) -> list[tuple[Any, list[Tensor], list[Tensor]]]:
    """Answers and what is expected, of drawn masks, layouts, gates and widths; every rank draws the same."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length = 24 * drawn.randint(1, 6)
    mask, cp = drawn_mask(drawn, length), make_cp()
    plan = cp.plan(length, mask)
    plan = replace(plan, layout=scattered(drawn, length, plan.ranks))
    told = rule, heads, gates = drawn.choice(RULES), drawn.choice(list(HEADS)), drawn.choice(GATES)
    tensors = draw(generator, HEADS[heads], rule, gates, "between", length)
    answers = on_rank(plan, tensors, strategy=drawn.choice(STRATEGIES))
    short = convolution_inputs(drawn.randint(1, 7), torch.float64, length)
    convolved = convolve_on_rank(plan, short, True, "silu")
    if dist.get_rank():
        return []
    *leaves, dout = tensors
    want = with_gradients(lambda *x: delta_rule(*x, mask, SCALE), leaves, dout)
    return [((seed, *told, plan), answers, want), (seed, convolved, expected_convolution(mask, short, True, "silu"))]


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.deep)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_drawn_layouts_masks_and_gates_equal_token_by_token(
    ranks: Callable[[int], RankPool], size: int, count: int
) -> None:
    for seed in range(count):
        for told, answers, want in ranks(size)(run_drawn, seed)[0]:
            check(answers, want, 1e-10, told)


@pytest.mark.parametrize(
    ("rule", "strategy", "layout"),
    [
        ("GDN", "state", "zigzag"),
        ("GDN", "all_to_all", "contiguous"),
        ("KDA", "state", "contiguous"),
        ("KDA", "all_to_all", "zigzag"),
    ],
)
def test_the_error_over_many_chunks_is_that_of_one_process(
    ranks: Callable[[int], RankPool], rule: str, strategy: str, layout: str
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        want, alone = long_answers(dtype, rule, True), long_answers(dtype, rule, False)
        answers = ranks(3)(run_long, 1, dtype, rule, strategy, layout)[0]
        for got, single, reference in zip(answers, alone, want, strict=True):
            error, norm = (got - reference).norm(), reference.norm()
            assert error < min(tolerance * norm, 1.5 * (single - reference).norm() + 1e-7 * norm), dtype


def test_gates_that_add_up_to_minus_50000_in_a_chunk_overflow_nothing() -> None:
    """A kernel that divides by cumulative decays makes exp(51200) of them."""
    tensors = draw(torch.Generator().manual_seed(2), (2, 2), "KDA", "-800", "between", 130, 1)
    *leaves, dout = (x.float() for x in tensors)
    leaves[3][:, ::2] = 0.0
    plan = make_plan(130)
    want = with_gradients(lambda *x: delta_rule(*x, plan.mask, 1.0), [x.double() for x in leaves], dout.double())
    check(with_gradients(lambda *x: gated_delta_rule(*x, plan, 1.0), leaves, dout), want, 1e-6, "gates")


@pytest.mark.parametrize("rule", RULES)
def test_each_head_goes_by_its_own_gates_forward_and_backward(rule: str) -> None:
    q, k, *rest = draw(
        torch.Generator().manual_seed(3), (2, 4), rule, "soft", "between", 200, 1
    )  # a chunk in the middle
    plan = make_plan(200)

    def answers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, dout: Tensor) -> list[Tensor]:
        return with_gradients(lambda *x: gated_delta_rule(*x, plan), [q, k, v, g, beta], dout)

    out, _, _, *gradients = answers(q, k, *rest)
    for head in range(4):
        key_head, own = slice(head // 2, head // 2 + 1), slice(head, head + 1)
        alone, _, _, *others = answers(q[:, :, key_head], k[:, :, key_head], *(x[:, :, own] for x in rest))
        check([x[:, :, own] for x in (out, *gradients)], [alone, *others], 1e-13, head)


def test_zeros_of_beta_and_gates_of_zero_keep_the_state_as_it_is() -> None:
    q, k, v, g, beta, _ = draw(torch.Generator().manual_seed(4), (1, 1), "GDN", "0", "between", 70, 1)
    beta[:, 1:] = 0.0
    out = gated_delta_rule(q, k, v, g, beta, make_plan(70), scale=1.0)
    torch.testing.assert_close(out, (q * k[:, :1]).sum(-1, keepdim=True) * beta[:, :1, :, None] * v[:, :1])


def run_other_layout(layout: Layout | str, lengths: tuple[int, ...]) -> list[list[Tensor]]:
    """The rule with both strategies, and a convolution of width 4."""
    cp, mask = make_cp(layout if isinstance(layout, str) else "zigzag"), AttentionMask(document_lengths=(lengths,))
    plan = cp.plan(S, mask)
    plan = replace(plan, layout=layout) if isinstance(layout, Layout) else plan
    case = Case("", "8 of 2", "GDN", "soft", "between", True, torch.float64)
    rule = [on_rank(plan, inputs(case), qk_l2norm=True, strategy=strategy) for strategy in STRATEGIES[:2]]
    return [*rule, convolve_on_rank(plan, convolution_inputs(4, torch.float64), True, "silu")]


SINGLE_TOKENS = Layout.of([[(token, token + 1) for token in range(rank, S, 4)] for rank in range(4)])


@pytest.mark.parametrize(
    ("size", "layout", "lengths"),
    [(4, SINGLE_TOKENS, (48,)), (2, "zigzag", (6, 10, 14, 18))],
    ids=["a halo from three ranks", "2 divides documents, 4 does not"],
)
def test_layouts_that_others_cannot_follow(
    ranks: Callable[[int], RankPool], size: int, layout: Layout | str, lengths: tuple[int, ...]
) -> None:
    """flash-linear-attention's halo is of the rank before alone; Megatron checks by cp and permutes by 2 cp."""
    mask = AttentionMask(document_lengths=(lengths,))
    *leaves, dout = inputs(Case("", "8 of 2", "GDN", "soft", "between", True, torch.float64))
    want = with_gradients(lambda *x: delta_rule(*x, mask, SCALE, True), leaves, dout)
    convolved = expected_convolution(mask, convolution_inputs(4, torch.float64), True, "silu")
    for got, reference in zip(ranks(size)(run_other_layout, layout, lengths)[0], [want, want, convolved], strict=True):
        check(got, reference, 1e-10, (layout, lengths))


@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
def test_backward_of_a_segment_knows_the_state_that_entered_it(ranks: Callable[[int], RankPool], strategy: str) -> None:
    """flash-linear-attention lost it between forward and backward: gradients were wrong by 3 to 5 %."""
    case = Case("one document", "4 of 4", "GDN", "soft", "between", False, torch.float64)
    *leaves, dout = inputs(case)
    halves = AttentionMask(document_lengths=((24, 24),))
    without = with_gradients(lambda *x: delta_rule(*x, halves, SCALE), leaves, dout)
    got = [x[:, 24:] for x in ranks(2)(run_cases, strategy, "contiguous", [case])[0][0]]
    check(got, [x[:, 24:] for x in expected(case)], 1e-10, strategy)
    for number in (2, 4, 5):  # of k, g and beta
        assert (got[number] - without[number][:, 24:]).norm() > 0.03 * got[number].norm()
