"""What is done to a model before it trains changes where things are, and none of its numbers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from models.llama import Llama, LlamaShape
from tests.ranks import RankPool
from torchtitan_cp.parallel import Meshes, parallelize

SHAPE = LlamaShape(32, 2, 4, 2, 8, 48, vocab_size=64)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: object) -> Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def run_step(recompute: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and the gradients of a sum over every rank's tokens."""
    with torch.device("meta"):
        model = Llama(SHAPE, attend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize(model, mesh, compute_dtype=torch.float32, recompute=recompute, seed=5)
    model.set_rope([1.0] * 4, 1.0, torch.device("cpu"))
    tokens = torch.arange(4 * 16).view(4, 16).chunk(dist.get_world_size())[dist.get_rank()]
    model(tokens, torch.arange(16), None).square().sum().backward()
    named = dict(model.named_parameters())
    return (
        {name: p.full_tensor().detach() for name, p in named.items()},  # type: ignore[attr-defined]
        {name: p.grad.full_tensor() for name, p in named.items()},  # type: ignore[union-attr]
    )


def test_weights_are_the_same_on_any_layout_and_gradients_are_summed_and_not_averaged(
    ranks: Callable[[int], RankPool],
) -> None:
    weights, gradients = ranks(1)(run_step, False)[0]
    for size, recompute in ((2, False), (4, False), (1, True), (2, True)):
        split_weights, split_gradients = ranks(size)(run_step, recompute)[0]
        for name, want in weights.items():
            assert torch.equal(split_weights[name], want), name
            error = (split_gradients[name] - gradients[name]).norm() / gradients[name].norm()
            assert error < 1e-5, (name, size, recompute)


def run_fill() -> dict[str, float]:
    with torch.device("meta"):
        model = Llama(LlamaShape(128, 2, 4, 2, 32, 256, vocab_size=512), attend)
    parallelize(model, init_device_mesh("cpu", (1,)), compute_dtype=torch.float32, recompute=False, seed=5)
    return {name: p.full_tensor().std().item() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def test_weights_start_with_the_deviation_that_the_model_gives(ranks: Callable[[int], RankPool]) -> None:
    deviations = ranks(1)(run_fill)[0]
    # Cut at three deviations, what is left has 0.987 of the one asked for.
    assert abs(deviations["layers.0.attention.wq.weight"] - 0.987 * 0.02) < 4e-4
    assert abs(deviations["layers.0.attention.wo.weight"] - 0.987 * 0.01) < 2e-4
    assert deviations["layers.0.attention_norm.weight"] == 0
    assert deviations["layers.0.attention.wq.weight"] != deviations["layers.1.attention.wq.weight"]


def run_meshes() -> list[list[int]]:
    meshes = Meshes("cpu", 4)
    groups = [meshes.for_cp(degree)["cp"].mesh.tolist() for degree in (1, 2, 4)]
    assert meshes.for_cp(2) is meshes.for_cp(2), "made once"
    return [*groups, meshes.for_hybrid(4, 2).mesh.flatten().tolist()]


def test_neighbouring_ranks_share_a_sequence(ranks: Callable[[int], RankPool]) -> None:
    answers = ranks(4)(run_meshes)
    assert answers[0] == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert answers[3] == [[3], [2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
