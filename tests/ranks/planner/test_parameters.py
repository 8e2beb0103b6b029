"""What the planner counts on a tensor-parallel rank is what the rank holds."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from models import ARCHITECTURES
from models.llama import LlamaArgs
from models.moe import MoeArgs
from tests.support.rank_pool import RankPool
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Model
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.tensor import apply_tensor_parallel
from torchtitan_cp.planner.parameters import count_parameters
from torchtitan_cp.training import registry

LLAMA = LlamaArgs(32, 2, 4, 2, 8, 48, vocab_size=61, qkv_bias=True, qk_norm=True, sinks=True)
TIED = LlamaArgs(32, 2, 4, 2, 8, 48, vocab_size=61, tie_embeddings=True)
EXPERTS = MoeArgs(32, 2, 4, 2, 8, 48, vocab_size=61, n_experts=4, n_shared_experts=1)


def held(architecture: str, args: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers that this rank of two holds of each parameter, and numbers of the whole parameters."""
    registry.register(ARCHITECTURES)
    model = registry.empty_model(Model(architecture), args)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    roles = registry.architecture(Model(architecture)).sharding
    apply_tensor_parallel(model, roles, Meshes("cpu", Degrees(1, 1, 1, 1, 2)).tp)

    def local(parameter: nn.Parameter) -> int:
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()

    return {name: local(parameter) for name, parameter in model.named_parameters()}, whole


@pytest.mark.parametrize(
    ("architecture", "args"), [("llama", LLAMA), ("llama", TIED), ("moe", EXPERTS)], ids=["options", "tied", "experts"]
)
def test_a_tensor_parallel_rank_holds_what_the_planner_counts(
    ranks: Callable[[int], RankPool], architecture: str, args: LlamaArgs
) -> None:
    registry.register(ARCHITECTURES)
    counts = count_parameters(Model(architecture), args, 2)
    of_ranks = ranks(2)(held, architecture, args)
    most = {name: max(part[name] for part, _ in of_ranks) for name in of_ranks[0][0]}
    whole = of_ranks[0][1]
    outside = {name: count for name, count in most.items() if not name.startswith("layers.")}
    assert sum(outside.values()) == counts.outer(True, True, args.tie_embeddings)
    layers = registry.empty_model(Model(architecture), args).layers
    vectors = {name for name, parameter in layers.named_parameters() if parameter.ndim == 1}
    assert counts.block - counts.matrices == sum(most[f"layers.{name}"] for name in vectors) // args.n_layers
    # Half of every matrix, though each rank holds a router whole; experts are counted apart.
    matrices = [name for name in most if name.startswith("layers.") and name.removeprefix("layers.") not in vectors]
    assert counts.matrices == sum(whole[name] for name in matrices) // args.n_layers // 2
    split = [name for name in matrices if ".experts." not in name and ".router." not in name]
    assert all(2 * most[name] == whole[name] for name in split)
