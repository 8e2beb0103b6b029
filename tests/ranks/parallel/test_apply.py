"""What is done to a model before it trains changes where things are, and none of its numbers."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import _inductor as inductor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.debug import CommDebugMode

from models.llama import SHARDING, Llama, LlamaArgs
from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from tests.support.small_llama import attend, config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.parallel import mesh
from torchtitan_cp.parallel.apply import parallelize
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.tensor import enable_async_tp, vocabulary_shard

SHAPE = LlamaArgs(32, 2, 4, 2, 8, 48, vocab_size=61, qkv_bias=True, qk_norm=True)


def run_step(
    replicate: int, tp: int, tied: bool, sections: dict[str, dict[str, object]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and the gradients of a sum over every rank's tokens, whole."""
    degrees = Degrees(1, replicate, dist.get_world_size() // (replicate * tp), 1, tp)
    meshes = Meshes("cpu", degrees)
    with torch.device("meta"):
        model = Llama(dataclasses.replace(SHAPE, tie_embeddings=tied), attend)
    parallelize(model, meshes, SHARDING, config(**sections))
    model.set_rope([1.0] * 4, 1.0, torch.device("cpu"))
    parts, index = dist.get_world_size() // tp, dist.get_rank() // tp
    tokens = (torch.arange(4 * 16) % 61).view(4, 16).chunk(parts)[index]

    def head(hidden: Tensor, output: nn.Linear) -> Tensor:
        whole, weight, group, first = vocabulary_shard(hidden, output.weight)
        assert (group is None) == (tp == 1)
        assert torch.equal(weight, output.weight.full_tensor()[first : first + len(weight)] if group else weight)  # type: ignore[operator]
        return (whole @ weight.t()).square().sum()

    model(tokens, torch.arange(16), None, head).backward()
    named = dict(model.named_parameters())
    return (
        {name: p.full_tensor().detach() for name, p in named.items()},  # type: ignore[attr-defined]
        {name: p.grad.full_tensor() for name, p in named.items()},  # type: ignore[union-attr]
    )


# [ranks, dp_replicate, tp, sections]
LAYOUTS = {
    "FSDP 2": (2, 1, 1, {}),
    "FSDP 4": (4, 1, 1, {}),
    "HSDP 2 x 2": (4, 2, 1, {}),
    "replicas only": (2, 2, 1, {}),
    "TP 2": (2, 1, 2, {}),
    "FSDP 2 x TP 2": (4, 1, 2, {}),
    "HSDP 2 x TP 2": (4, 2, 2, {}),
    "full": (1, 1, 1, {"activation": {"checkpoint": "full"}}),
    "full on FSDP 2": (2, 1, 1, {"activation": {"checkpoint": "full"}}),
    "selective": (2, 1, 1, {"activation": {"checkpoint": "selective"}}),
    "attention saved, on TP 2": (2, 1, 2, {"activation": {"checkpoint": "attention_saved"}}),
    "MLP in 3 tiles": (2, 1, 1, {"activation": {"mlp_tiles": 3}}),
    "MLP in 3 tiles, recomputed, on FSDP 2 x TP 2": (4, 1, 2, {"activation": {"mlp_tiles": 3, "checkpoint": "full"}}),
    "MLP in 3 tiles, selective": (2, 1, 1, {"activation": {"mlp_tiles": 3, "checkpoint": "selective"}}),
    "weights never freed": (2, 1, 1, {"parallel": {"fsdp_reshard": "never"}}),
    "compiled": (1, 1, 1, {"compile": {"enable": True}}),
    "compiled, selective, on FSDP 2": (
        2,
        1,
        1,
        {"compile": {"enable": True}, "activation": {"checkpoint": "selective"}},
    ),
    "compiled, on TP 2": (2, 1, 2, {"compile": {"enable": True}}),
}


@pytest.fixture(scope="module")
def plain(ranks: Callable[[int], RankPool]) -> dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return {tied: ranks(1)(run_step, 1, 1, tied, {})[0] for tied in (False, True)}


# Each layout with tied embeddings or without, by turns.
@deep_rows(
    ("layout", "tied"),
    [(layout, bool(number % 2)) for number, layout in enumerate(LAYOUTS)],
    default=[
        ("FSDP 4", True),
        ("replicas only", True),
        ("HSDP 2 x TP 2", False),
        ("attention saved, on TP 2", False),
        ("MLP in 3 tiles, recomputed, on FSDP 2 x TP 2", False),
        ("MLP in 3 tiles, selective", True),
        ("weights never freed", False),
    ],
)
def test_weights_are_the_same_on_any_layout_and_gradients_are_summed_and_not_averaged(
    ranks: Callable[[int], RankPool],
    plain: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]],
    layout: str,
    tied: bool,
) -> None:
    size, replicate, tp, sections = LAYOUTS[layout]
    weights, gradients = plain[tied]
    split_weights, split_gradients = ranks(size)(run_step, replicate, tp, tied, sections)[0]
    assert split_weights.keys() == weights.keys()
    for name, want in weights.items():
        assert torch.equal(split_weights[name], want), name
        error = (split_gradients[name] - gradients[name]).norm() / gradients[name].norm()
        assert error < 1e-5, (name, error)


def run_fill() -> dict[str, float]:
    with torch.device("meta"):
        model = Llama(LlamaArgs(128, 2, 4, 2, 32, 256, vocab_size=512), attend)
    parallelize(model, Meshes("cpu", Degrees(1, 1, 1, 1, 1)), SHARDING, config())
    return {name: p.full_tensor().std().item() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def test_weights_start_with_the_deviation_that_the_model_gives(ranks: Callable[[int], RankPool]) -> None:
    deviations = ranks(1)(run_fill)[0]
    # Cut at three deviations, what is left has 0.987 of the one asked for.
    assert abs(deviations["layers.0.attention.wq.weight"] - 0.987 * 0.02) < 4e-4
    assert abs(deviations["layers.0.attention.wo.weight"] - 0.987 * 0.01) < 2e-4
    assert deviations["layers.0.attention_norm.weight"] == 0
    assert deviations["layers.0.attention.wq.weight"] != deviations["layers.1.attention.wq.weight"]


def run_meshes() -> tuple[list[list[int]], list[int], bool]:
    meshes = Meshes("cpu", Degrees(1, 1, 4, 1, 2))
    groups = [meshes.for_cp(degree).mesh.tolist() for degree in (1, 2, 4)]
    assert meshes.for_cp(2) is meshes.for_cp(2), "made once"
    before, fresh = len(distributed_c10d._world.pg_map), Meshes("cpu", meshes.degrees)
    with patch.object(mesh, "DeviceMesh", DeviceMesh):  # ranks of tests share what they made before
        fresh.for_cp(2)
    assert len(distributed_c10d._world.pg_map) - before == 2, "a stage with another degree makes no group it can spare"
    for degree in (1, 2, 4):
        shared = [
            rank
            for rank in range(8)
            if meshes.coordinate(rank, degree)[1] == meshes.coordinate(dist.get_rank(), degree)[1]
        ]
        peers = [rank for rank in shared if rank % 2 == dist.get_rank() % 2]
        assert meshes.for_cp(degree).mesh.tolist() == peers
        assert [meshes.coordinate(rank, degree)[2] for rank in peers] == list(range(degree))
    return (
        [*groups, meshes.for_hybrid(4, 2).mesh.flatten().tolist()],
        meshes.parameters["tp"].mesh.tolist(),
        meshes.owns_tokens,
    )


def test_tensor_parallel_ranks_are_neighbours_and_context_parallel_ranks_come_next(
    ranks: Callable[[int], RankPool],
) -> None:
    answers = ranks(8)(run_meshes)
    assert answers[0] == ([[0], [0, 2], [0, 2, 4, 6], [0, 2, 4, 6]], [0, 1], True)
    assert answers[7] == ([[7], [5, 7], [1, 3, 5, 7], [1, 3, 5, 7]], [6, 7], False)


def run_own_groups() -> list[tuple[str, ...]]:
    """The names of groups over all four ranks: the default one, FSDP's, and those of context parallelism."""
    meshes = Meshes("cpu", Degrees(1, 1, 4, 1, 1))
    cp = [meshes.for_cp(degree).get_group() for degree in (4, 2, 1)]
    hybrid = [group for inner in (4, 2, 1) for group in meshes.for_hybrid(4, inner).get_all_groups()]
    assert [group.size() for group in (*cp, *hybrid)] == [4, 2, 1, 1, 4, 2, 2, 4, 1]
    whole = [group for group in (*cp, *hybrid) if group.size() > 1]
    for number, group in enumerate(whole):
        x = torch.full((3,), float(number))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [number * group.size()] * 3
    shared = [dist.group.WORLD, meshes.fsdp.get_group()]
    return [tuple(group.group_name for group in groups) for groups in (shared, whole)]  # type: ignore[union-attr]


def test_context_parallelism_shares_no_group_with_fsdp_nor_among_its_axes(ranks: Callable[[int], RankPool]) -> None:
    for shared, own in ranks(4)(run_own_groups):
        assert len({*shared, *own}) == len({*shared}) + 6, (shared, own)


def options_on_nccl() -> dict[str, Any]:
    """What the groups of each axis of a mesh would be made with on NCCL; gloo makes them without options."""
    given: dict[str, Any] = {}

    def make(device_type: str, ranks: Tensor, *, mesh_dim_names: Any, backend_override: Any) -> Any:
        given.update(zip(mesh_dim_names, backend_override, strict=True))
        return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)

    nccl = SimpleNamespace(Options=lambda **options: SimpleNamespace(**options))
    meshes = Meshes("cpu", Degrees(1, 1, 4, 1, 1))
    with (
        patch.object(dist, "get_backend", lambda *_: "nccl"),
        patch.object(distributed_c10d, "ProcessGroupNCCL", nccl, create=True),
        patch.object(distributed_c10d, "is_nccl_available", lambda: False),  # the groups are gloo's
        patch.object(mesh, "DeviceMesh", make),
    ):
        meshes.for_hybrid(4, 2)
    return {axis: (backend, vars(options)) for axis, (backend, options) in given.items() if backend}


def test_messages_of_context_parallelism_go_before_what_the_gpu_computes(ranks: Callable[[int], RankPool]) -> None:
    expected = {axis: ("nccl", {"is_high_priority_stream": True}) for axis in ("ring", "all_to_all")}
    assert ranks(4)(options_on_nccl) == [expected] * 4


def run_timeouts(seconds: float) -> list[float]:
    """The timeout of every group, in seconds, where the default group's is `seconds`."""
    before = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    _set_pg_timeout(timedelta(seconds=seconds))
    try:
        meshes = Meshes("cpu", Degrees(1, 1, 2, 1, 2))
        made = [meshes.parameters, *map(meshes.for_cp, (1, 2)), meshes.for_hybrid(2, 2)]
        groups = [group for mesh in made for group in mesh.get_all_groups()]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]  # type: ignore[attr-defined]
    finally:
        _set_pg_timeout(before)


def test_every_group_has_the_timeout_that_the_ranks_joined_with(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4)(run_timeouts, 4321.0) == [[4321.0] * 8] * 4


def overlap() -> bool:
    enable_async_tp(init_device_mesh("cpu", (dist.get_world_size(),)))
    return inductor.config._micro_pipeline_tp


def test_products_overlap_on_cuda_only(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(overlap) == [False, False]


def gathers(reshards: str) -> int:
    """All-gathers of weights in a step."""
    with torch.device("meta"):
        model = Llama(SHAPE, attend)
    parallelize(model, Meshes("cpu", Degrees(1, 1, 2, 1, 1)), SHARDING, config(parallel={"fsdp_reshard": reshards}))
    model.set_rope([1.0] * 4, 1.0, torch.device("cpu"))
    tokens = (torch.arange(2 * 16) % 61).view(2, 16)
    with CommDebugMode() as comm:
        model(tokens, torch.arange(16), None, lambda hidden, output: output(hidden).square().sum()).backward()
    return sum(count for name, count in comm.get_comm_counts().items() if "gather" in str(name))


def test_blocks_are_gathered_again_for_backward_and_the_ends_stay(ranks: Callable[[int], RankPool]) -> None:
    """The output is the last that forward uses and the first that backward does."""
    blocks, ends = SHAPE.n_layers, 1
    assert ranks(2)(gathers, "always")[0] == 2 * blocks + ends
    assert ranks(2)(gathers, "never")[0] == blocks + ends
