"""torch.compile, activation checkpointing, parameters and messages around linear attention."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.linear_cases import count_bytes
from tests.support.rank_pool import RankPool
from tests.support.recurrence import convolution, delta_rule
from torchtitan_cp.attention import (
    AttentionMask,
    ContextParallel,
    Plan,
    PlanError,
    causal_conv,
    gated_delta_rule,
    selective_scan,
    sum_ranks,
)

S, WIDTH, KEY_HEADS, VALUE_HEADS, DIM = 64, 24, 2, 4, 8
PACKINGS = [(64,), (10, 54), (1, 30, 33), (20, 44), (64,)]
CONVOLVED = (2 * KEY_HEADS + VALUE_HEADS) * DIM


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Of a mixer as in the published models: projection, convolution, A_log, dt_bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"project": (CONVOLVED + 2 * VALUE_HEADS, WIDTH), "convolve": (CONVOLVED, 4), "bias": (CONVOLVED,)}
    shapes |= {"A_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,), "out": (WIDTH, VALUE_HEADS * DIM)}
    return {
        name: (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def mix(
    x: Tensor,
    weights: dict[str, Tensor],
    convolve: Callable[..., Tensor],
    rule: Callable[..., Tensor],
) -> Tensor:
    """One layer on `[B, s, E]`."""
    mixed, step, gate = (x @ weights["project"].T).split([CONVOLVED, VALUE_HEADS, VALUE_HEADS], -1)
    mixed = convolve(mixed, weights["convolve"], weights["bias"])
    heads = mixed.unflatten(-1, (-1, DIM))
    q, k, v = heads.split([KEY_HEADS, KEY_HEADS, VALUE_HEADS], 2)
    g = -weights["A_log"].exp() * torch.nn.functional.softplus(gate + weights["dt_bias"])
    return x + rule(q, k, v, g, step.sigmoid()).flatten(2) @ weights["out"].T


def mixer(weights: dict[str, Tensor], strategy: str) -> Callable[[Tensor, Plan], Tensor]:
    def block(x: Tensor, plan: Plan) -> Tensor:
        return mix(
            x,
            weights,
            lambda x, weight, bias: causal_conv(x, weight, plan, bias, "silu"),
            lambda *inputs: gated_delta_rule(*inputs, plan, qk_l2norm=True, strategy=strategy),
        )

    return block


def one_process(x: Tensor, weights: dict[str, Tensor], mask: AttentionMask) -> Tensor:
    return mix(
        x,
        weights,
        lambda x, weight, bias: convolution(x, weight, mask, bias, "silu"),
        lambda *inputs: delta_rule(*inputs, mask, DIM**-0.5, True),
    )


def make_plan(lengths: tuple[int, ...], layout: str = "zigzag") -> Plan:
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), layout=layout)
    return cp.plan(S, AttentionMask(document_lengths=(lengths,)))


def tokens(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, S, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(out: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), list(weights.values())))


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def run_parameters(strategy: str, layout: str, lengths: tuple[int, ...]) -> float:
    """Gradients summed over the ranks against those of one process, which rank 0 works out."""
    weights, plan, x = parameters(), make_plan(lengths, layout), tokens(3)
    own = gradients(mixer(weights, strategy)(plan.shard(x), plan), weights)
    summed = [sum_ranks(gradient, plan) for gradient in own]
    if dist.get_rank():
        return 0.0
    return largest_difference(summed, gradients(one_process(x, weights, plan.mask), weights))


@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
def test_gradients_of_the_parameters_summed_over_ranks_are_those_of_one_process(
    ranks: Callable[[int], RankPool], strategy: str
) -> None:
    for layout, lengths in (("zigzag", (64,)), ("balanced", (1, 30, 33)), ("contiguous", (20, 44))):
        assert max(ranks(4)(run_parameters, strategy, layout, lengths)) < 1e-10


def run_compiled(strategy: str) -> tuple[int, float]:
    weights = parameters(torch.float32)
    block = mixer(weights, strategy)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, differences = torch.compile(block, fullgraph=True, backend=counter), []
    for seed, lengths in enumerate(PACKINGS):
        plan = make_plan(lengths)
        x = plan.shard(tokens(seed, torch.float32))
        pair = [gradients(run(x, plan), weights) for run in (compiled, block)]
        differences.append(largest_difference(*pair))
    return counter.frame_count, max(differences)


@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
def test_a_mixer_compiles_whole_and_another_packing_compiles_nothing_anew(
    ranks: Callable[[int], RankPool], strategy: str
) -> None:
    for graphs, difference in ranks(2)(run_compiled, strategy):
        assert graphs == 1
        assert difference < 1e-6


def run_layouts() -> tuple[int, float]:
    """Packings whose documents layouts have other numbers of runs."""
    weights = parameters(torch.float32)
    block = mixer(weights, "auto")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, differences, runs = torch.compile(block, fullgraph=True, backend=counter), [], set()
    for seed, lengths in enumerate([*PACKINGS, (1,) * 64, (3,) * 21 + (1,), (16, 16, 16, 16), (5,) * 12 + (4,)]):
        plan = make_plan(lengths, "documents")
        runs.add(plan.most_runs)
        x = plan.shard(tokens(seed, torch.float32))
        pair = [gradients(run(x, plan), weights) for run in (compiled, block)]
        differences.append(largest_difference(*pair))
    assert len(runs) > 2
    return counter.frame_count, max(differences)


def test_layouts_of_other_numbers_of_runs_compile_at_most_once_more(ranks: Callable[[int], RankPool]) -> None:
    for graphs, difference in ranks(2)(run_layouts):
        assert graphs <= 3
        assert difference < 1e-6


def run_in_flight(strategy: str, saved: bool) -> float:
    """Three micro-batches go forward before the first goes backward, each recomputed under its own plan."""
    weights = parameters()
    block, plans = mixer(weights, strategy), [make_plan(lengths, "documents") for lengths in PACKINGS[1:4]]
    inputs = [plan.shard(tokens(9)) for plan in plans]
    plain = [gradients(block(x, plan), weights) for x, plan in zip(inputs, plans, strict=True)]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = op == torch.ops.torchtitan_cp.gated_delta_rule.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if saved else {}
    outs = [checkpoint(block, x, plan, use_reentrant=False, **options) for x, plan in zip(inputs, plans, strict=True)]
    for out in outs:
        out.square().sum().backward()
    own = [weight.grad for weight in weights.values()]
    return largest_difference(own, [sum(x) for x in zip(*plain, strict=True)])  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
def test_recomputation_and_several_micro_batches_in_flight(
    ranks: Callable[[int], RankPool], strategy: str, saved: bool
) -> None:
    assert max(ranks(2)(run_in_flight, strategy, saved)) < 1e-10


def published_layer(seq_len: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of the size of a layer of Qwen3-Next: 16 key and 32 value heads of 128."""
    shapes = [(16, 128), (16, 128), (32, 128), (32,), (32,)]
    q, k, v, g, beta = (torch.randn(1, seq_len, *shape) for shape in shapes)
    return [*(x.to(dtype) for x in (q, k, v)), -g.abs(), beta.sigmoid()]


def run_counted(strategy: str, seq_len: int, layout: str, mask: AttentionMask) -> tuple[int, int, int]:
    """(bytes forward, bytes backward, segments of all ranks)."""
    plan = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), layout=layout).plan(seq_len, mask)
    leaves = [plan.shard(x).requires_grad_() for x in published_layer(seq_len, torch.bfloat16)]
    outs: list[Tensor] = []
    forward = count_bytes(lambda: outs.append(gated_delta_rule(*leaves, plan, qk_l2norm=True, strategy=strategy)))
    return forward, count_bytes(lambda: outs[0].sum().backward()), len(plan.layout.segments)


MIB = 2**20


@pytest.mark.parametrize(("layout", "size"), [("contiguous", 2), ("zigzag", 4)])
def test_states_send_6_mib_a_segment_forward_and_4_backward(
    ranks: Callable[[int], RankPool], layout: str, size: int
) -> None:
    answers = ranks(size)(run_counted, "state", 64, layout, AttentionMask())
    segments = answers[0][2]
    # A state of 32 heads is 2 MiB. The first segment gets no state and needs no A, and the last needs neither A nor B.
    forward = (6 * segments - 3 * 2 - 2) * MIB * (size - 1) // size
    backward = (4 * segments - 2 * 2) * MIB * (size - 1) // size
    assert sum(answer[0] for answer in answers) == forward
    assert sum(answer[1] for answer in answers) == backward


def test_documents_that_stay_on_a_rank_send_nothing(ranks: Callable[[int], RankPool]) -> None:
    whole = AttentionMask(document_lengths=((16, 10, 6, 16, 16),))
    assert ranks(4)(run_counted, "state", 64, "contiguous", whole) == [(0, 0, 4)] * 4
    # One of them crosses from rank 0 to rank 1: B, the state that enters, and their gradients.
    crossing = AttentionMask(document_lengths=((10, 22, 16, 16),))
    answers = ranks(4)(run_counted, "state", 64, "contiguous", crossing)
    assert sum(answer[0] for answer in answers) == sum(answer[1] for answer in answers) == 2 * 2 * MIB * 3 // 4


def test_heads_in_trade_send_what_the_formula_says(ranks: Callable[[int], RankPool]) -> None:
    forward, backward, _ = ranks(2)(run_counted, "all_to_all", 64, "zigzag", AttentionMask())[0]
    one_way = 32 * (2 * 16 * 128 + 2 * 32 * 128) * 2 // 2
    gates = 32 * 2 * 32 * 4 // 2
    assert (forward, backward) == (one_way + gates, one_way + gates)


def run_halo_counted() -> tuple[int, int]:
    """Bytes forward and backward of a convolution of 3 channels and width 4, over two batch rows in bf16."""
    x, weight, plan = tokens(1, torch.bfloat16)[..., :3], torch.ones(3, 4, dtype=torch.bfloat16), make_plan((62, 2))
    leaf, outs = plan.shard(x).requires_grad_(), list[Tensor]()
    forward = count_bytes(lambda: outs.append(causal_conv(leaf, weight, plan)))
    return forward, count_bytes(lambda: outs[0].sum().backward())


def test_a_convolution_sends_the_tokens_before_a_run_twice_and_their_gradients_back(
    ranks: Callable[[int], RankPool],
) -> None:
    """Zigzag on two ranks: rank 1 has the second and third quarter. Halos are not kept for backward."""
    three_tokens = 2 * 3 * 3 * 2
    assert ranks(2)(run_halo_counted) == [(three_tokens, 2 * three_tokens)] * 2


def run_refusals() -> list[str]:
    plan = make_plan((64,))
    window = ContextParallel(init_device_mesh("cpu", (2,)), layout="zigzag").plan(S, AttentionMask(window=(9, -1)))
    rows = ContextParallel(init_device_mesh("cpu", (2,))).plan(S, AttentionMask(document_lengths=((64,),) * 3))
    q, v, g = torch.zeros(2, 32, 2, 8), torch.zeros(2, 32, 4, 8), torch.zeros(2, 32, 4)
    x, weight = torch.zeros(2, 32, 6), torch.zeros(6, 4)
    calls: list[Callable[[], Any]] = [
        lambda: gated_delta_rule(q, q, v, g, g, plan, strategy="ring"),
        lambda: gated_delta_rule(q, q, v, g, g, window),
        lambda: gated_delta_rule(q, q, v, g, g, rows),
        lambda: gated_delta_rule(q, q, v[:, :, :3], g[:, :, :3], g[:, :, :3], plan),
        lambda: gated_delta_rule(q, q, v, g[..., :2], g, plan),
        lambda: gated_delta_rule(*(y[:, :16] for y in (q, q, v, g, g)), plan),
        lambda: gated_delta_rule(q, q, v.bfloat16(), g, g, plan),
        lambda: causal_conv(x, weight, window),
        lambda: causal_conv(x, weight[:5], plan),
        lambda: causal_conv(x, weight, plan, activation="relu"),
        lambda: causal_conv(x[:, :16], weight, plan),
        lambda: selective_scan(v, g, torch.zeros(3), q, q, plan),
    ]
    said = []
    for call in calls:
        with pytest.raises(PlanError) as error:
            call()
        said.append(str(error.value))
    return said


def test_calls_that_do_not_fit_are_refused_with_what_would(ranks: Callable[[int], RankPool]) -> None:
    said = ranks(2)(run_refusals)[0]
    assert "strategy of linear attention 'ring' is not available; use one of auto, state, all_to_all" in said[0]
    assert "are causal and have no window, and the plan's mask is not so; give them a plan" in said[1]
    assert "the mask has documents of 3 batch rows and the inputs have 2" in said[2]
    for message in said[3:6]:
        assert "Hv a multiple of Hk, with S/P = 32, got q (2, " in message
    assert "v torch.bfloat16; cast them to one" in said[6]
    assert "are causal and have no window" in said[7]
    assert (
        "weight [C, W] and bias [C], with S/P = 32, got x (2, 32, 6), weight (5, 4); shard with plan.shard" in said[8]
    )
    assert "activation 'relu' is not available; use one of silu" in said[9]
    assert "S/P = 32, got x (2, 16, 6), weight (6, 4)" in said[10]
    assert "dt [B, S/P, H], A [H], with S/P = 32, got x (2, 32, 4, 8), dt (2, 32, 4), A (3,); shard" in said[11]


def run_auto() -> list[str]:
    """What auto logs: a short sequence of small heads trades them, large heads of a long one pass states."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtitan_cp.attention.linear.operator")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for length, heads, dim in ((32, 4, 64), (512, 4, 8), (32, 3, 16)):
        plan = ContextParallel(init_device_mesh("cpu", (2,)), layout="contiguous").plan(length)
        q, g = torch.randn(1, length // 2, heads, dim), torch.zeros(1, length // 2, heads)
        gated_delta_rule(q, q, q, g, g, plan)
    logger.removeHandler(handler)
    return said


def test_auto_takes_what_sends_less_and_says_why(ranks: Callable[[int], RankPool]) -> None:
    short, long, odd = ranks(2)(run_auto)[0]
    assert short == (
        "linear attention on 2 ranks takes strategy all_to_all: 4 value and 4 key heads; forward and backward, states "
        "send up to 320 KiB a rank, and trading heads (if they divide) 129 KiB"
    )
    assert "takes strategy state" in long
    assert "takes strategy state: 3 value" in odd


def run_isolated(strategy: str, layout: str) -> list[list[bool]]:
    """Whether the second document's output and gradients are bit for bit the same beside another first document."""
    plan = make_plan((27, 37), layout)
    generator, answers = torch.Generator().manual_seed(4), []
    weights = parameters(torch.float32)
    second = torch.randn(1, 37, WIDTH, generator=generator)
    for _ in range(2):
        first = 100 * torch.randn(1, 27, WIDTH, generator=generator)
        x = plan.shard(torch.cat([first, second], 1)).requires_grad_()
        out = mixer(weights, strategy)(x, plan)
        dout = plan.shard(torch.cat([first, second], 1))
        answers.append([plan.unshard(y)[:, 27:] for y in (out.detach(), *torch.autograd.grad(out, x, dout))])
    return [[torch.equal(one, other) for one, other in zip(*answers, strict=True)]]


@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_a_first_document_changes_nothing_in_the_second_nor_its_gradient(
    ranks: Callable[[int], RankPool], strategy: str, layout: str
) -> None:
    assert ranks(4)(run_isolated, strategy, layout) == [[[True, True]]] * 4


def run_garbage(strategy: str) -> list[bool]:
    """Padding holds NaN in every input and in dout."""
    mask = AttentionMask(document_lengths=((8, 56),), used_lengths=((5, 50),))
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), layout="zigzag")
    plan, padding = cp.plan(S, mask), torch.ones(S, dtype=torch.bool)
    padding[:5], padding[8:58] = False, False
    generator = torch.Generator().manual_seed(2)
    shapes = [(KEY_HEADS, DIM), (KEY_HEADS, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS,), (VALUE_HEADS,), (CONVOLVED,)]
    made = [torch.randn(2, S, *shape, generator=generator) for shape in shapes]
    made[3] = -made[3].abs()
    full = [y.masked_fill(padding.view(-1, *[1] * (y.ndim - 2)), float("nan")) for y in made]
    leaves = [plan.shard(y).requires_grad_() for y in full]
    rule = gated_delta_rule(*leaves[:5], plan, qk_l2norm=True, strategy=strategy)
    convolved = causal_conv(leaves[5], torch.ones(CONVOLVED, 4), plan, torch.ones(CONVOLVED), "silu")
    nowhere = plan.shard(torch.where(padding, float("nan"), 1.0), 0)
    rule.backward(torch.ones_like(rule) * nowhere[:, None, None])
    convolved.backward(torch.ones_like(convolved) * nowhere[:, None])
    answers = [plan.unshard(y) for y in (rule.detach(), convolved.detach(), *(y.grad for y in leaves))]  # type: ignore[arg-type]
    return [bool(y.isfinite().all() and (y[:, padding] == 0).all()) for y in answers]


@pytest.mark.parametrize("strategy", ["state", "all_to_all"])
def test_padding_gives_exact_zeros_whatever_it_holds(ranks: Callable[[int], RankPool], strategy: str) -> None:
    assert all(all(answer) for answer in ranks(2)(run_garbage, strategy))
