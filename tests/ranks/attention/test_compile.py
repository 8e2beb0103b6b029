"""torch.compile and activation checkpointing around attention whose plan changes from call to call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.rank_pool import RankPool
from torchtitan_cp.attention import AttentionMask, ContextParallel, Plan, attend, gated_delta_rule
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.strategies.strategy import Strategy

S, WIDTH = 64, 32
PACKINGS = [(64,), (10, 54), (1, 30, 33), (20, 44), (64,), None]  # None: a mask without documents

Block = Callable[[Tensor, Plan], Tensor]


def make_block(strategy: str) -> tuple[ContextParallel, Tensor, Block]:
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), strategy)
    weight = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def block(x: Tensor, plan: Plan) -> Tensor:
        q, k, v = (x @ weight.T).unflatten(-1, (3, 4, WIDTH // 4)).unbind(2)
        return x + cp.attention(q, k, v, plan).flatten(2)

    return cp, weight, block


def plan_for(cp: ContextParallel, lengths: tuple[int, ...] | None) -> Plan:
    return cp.plan(S, AttentionMask(document_lengths=lengths and (lengths,)))


def gradient(run: Block, x: Tensor, plan: Plan, weight: Tensor) -> Tensor:
    return torch.autograd.grad(run(x, plan).square().sum(), weight)[0]


def run_compiled(strategy: str, recomputed: bool) -> dict[str, Any]:
    cp, weight, block = make_block(strategy)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(x: Tensor, plan: Plan) -> Tensor:
        return checkpoint(block, x, plan, use_reentrant=False) if recomputed else block(x, plan)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    differences = []
    for seed, lengths in enumerate(PACKINGS):
        plan = plan_for(cp, lengths)
        x = plan.shard(torch.randn(2, S, WIDTH, generator=torch.Generator().manual_seed(seed)))
        pair = [gradient(run, x, plan, weight) for run in (compiled, block)]
        differences.append((pair[0] - pair[1]).abs().max().item())
    return {"graphs": counter.frame_count, "difference": max(differences)}


def run_stages(strategy: str, recomputed: bool = False) -> tuple[list[float], int]:
    """A curriculum: context-parallel degrees and lengths change under one compiled block."""
    world = dist.get_world_size()
    weight = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, plan: Plan) -> Tensor:
        q, k, v = (x @ weight.T).unflatten(-1, (3, 4, WIDTH // 4)).unbind(2)
        return x + attend(q, k, v, plan).flatten(2)

    def run(x: Tensor, plan: Plan) -> Tensor:
        return checkpoint(block, x, plan, use_reentrant=False) if recomputed else block(x, plan)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    differences = []
    for degree, length in ((1, 32), (2, 32), (2, 64), (4, 64), (4, 128), (2, 128), (1, 64)):
        mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "cp"))
        plan = ContextParallel(mesh["cp"], strategy).plan(length)
        x = plan.shard(torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length)))
        pair = [gradient(run, x, plan, weight) for run in (compiled, block)]
        differences.append((pair[0] - pair[1]).abs().max().item() / pair[1].abs().max().item())
    return differences, counter.frame_count


@pytest.mark.deep
def test_stages_of_other_lengths_and_degrees_run_in_one_compiled_block(ranks: Callable[[int], RankPool]) -> None:
    for differences, graphs in ranks(4)(run_stages, "auto"):
        assert max(differences) < 1e-6
        assert graphs <= 5, "a stage compiles at most once, and 7 of them less often"


@pytest.mark.deep
@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_that_trade_heads_change_in_one_compiled_block(
    ranks: Callable[[int], RankPool], recomputed: bool
) -> None:
    for differences, graphs in ranks(4)(run_stages, "all_to_all", recomputed):
        assert max(differences) < 1e-6
        assert graphs <= 7


def run_head_counts() -> list[bool]:
    """Layers of other numbers of heads, which trade them, in one compiled function."""
    plan = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), "all_to_all").plan(S)
    torch._dynamo.reset()

    def layer(x: Tensor) -> Tensor:
        gates = -x.square().sum(-1)
        return attend(x, x, x, plan) + gated_delta_rule(x, x, x, gates, gates.exp(), plan, strategy="all_to_all")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same = []
    for heads in (4, 2, 6):
        x = torch.randn(1, plan.local_tokens, heads, 8, requires_grad=True)
        got, want = (torch.autograd.grad(run(x).square().sum(), x)[0] for run in (compiled, layer))
        same.append(torch.allclose(got, want, atol=1e-5))
    return same


def test_layers_of_other_numbers_of_heads_run_in_one_compiled_function(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(run_head_counts) == [[True] * 3] * 2


def run_batches() -> float:
    """Batches of other numbers of rows, each row packed in its own way, in one compiled block."""
    cp, weight, block = make_block("ring")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    differences = []
    for rows in (1, 4, 3, 5, 1):
        plan = cp.plan(S, AttentionMask(document_lengths=tuple(PACKINGS[:rows])))
        x = plan.shard(torch.randn(rows, S, WIDTH, generator=torch.Generator().manual_seed(rows)))
        pair = [gradient(run, x, plan, weight) for run in (compiled, block)]
        differences.append((pair[0] - pair[1]).abs().max().item())
    return max(differences)


@pytest.mark.deep
def test_batches_of_other_sizes_with_documents_of_their_own_run_in_one_compiled_block(
    ranks: Callable[[int], RankPool],
) -> None:
    assert all(difference < 1e-5 for difference in ranks(2)(run_batches))


@pytest.mark.parametrize(
    ("strategy", "recomputed"),
    [("ring", False), ("all_gather", False), ("all_to_all", False), ("auto", False), ("auto", True)],
)
def test_a_block_compiles_whole_and_another_plan_compiles_nothing_anew(
    ranks: Callable[[int], RankPool], strategy: str, recomputed: bool
) -> None:
    for answer in ranks(2)(run_compiled, strategy, recomputed):
        assert answer["graphs"] == 1
        assert answer["difference"] < 1e-6


def run_in_flight(strategy: str) -> float:
    """Two micro-batches forward before the first goes backward, each recomputed under its own plan."""
    cp, weight, block = make_block(strategy)
    plans = [plan_for(cp, lengths) for lengths in PACKINGS[1:4]]
    inputs = [plan.shard(torch.randn(1, S, WIDTH, generator=torch.Generator().manual_seed(9))) for plan in plans]
    plain = sum(gradient(block, x, plan, weight) for x, plan in zip(inputs, plans, strict=True))
    outs = [checkpoint(block, x, plan, use_reentrant=False) for x, plan in zip(inputs, plans, strict=True)]
    weight.grad = None
    for out in outs:
        out.square().sum().backward()
    assert weight.grad is not None
    return (weight.grad - plain).abs().max().item()


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_recomputation_sees_the_plan_of_its_own_micro_batch(ranks: Callable[[int], RankPool], strategy: str) -> None:
    assert all(difference < 1e-5 for difference in ranks(2)(run_in_flight, strategy))


def run_selective() -> tuple[int, float]:
    """How often attention runs forward where its output is saved and the rest is recomputed."""
    cp, weight, block = make_block("ring")
    plan = plan_for(cp, PACKINGS[2])
    x = plan.shard(torch.randn(1, S, WIDTH, generator=torch.Generator().manual_seed(9)))
    plain = gradient(block, x, plan, weight)
    ring, forwards = STRATEGIES["ring"], []

    def counting(*arguments: Any) -> Any:
        forwards.append(1)
        return ring.forward(*arguments)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op == torch.ops.torchtitan_cp.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor, plan: Plan) -> Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(block, x, plan, use_reentrant=False, context_fn=contexts)

    STRATEGIES["ring"] = Strategy(counting, ring.backward)
    try:
        difference = (gradient(run, x, plan, weight) - plain).abs().max().item()
    finally:
        STRATEGIES["ring"] = ring
    return len(forwards), difference


def test_attention_can_be_saved_while_the_rest_is_recomputed(ranks: Callable[[int], RankPool]) -> None:
    for forwards, difference in ranks(2)(run_selective):
        assert forwards == 1
        assert difference < 1e-6
