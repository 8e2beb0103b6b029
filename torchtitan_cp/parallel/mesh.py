"""Meshes of a run: one that parameters are sharded on, and one for each context-parallel degree of its stages."""

from functools import cache, cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from torchtitan_cp.config.degrees import Degrees

# Axes of context parallelism. By itself torch gives an axis that spans the world the default group, as it does FSDP's.
OWN_GROUPS = ("cp", "ring", "all_to_all")


class Meshes:
    """Meshes over all ranks of the job.

    Ranks are numbered with tensor parallelism innermost, so that its ranks share a node, then context parallelism,
    then the rest. Parameters are sharded over the flattened (dp_shard, cp) ranks, whose product no stage changes; a
    stage with another CP degree only gets other groups, made when it starts and kept.

    Context parallelism shares its groups with nothing else: an NCCL group runs its messages one after another, and keys
    and values must not wait behind the weights that FSDP2 gathers. All groups have the default group's timeout.

    Args:
        device_type: "cpu" or "cuda".
        degrees: of every axis.

    Attributes:
        parameters: (pp, dp_replicate, fsdp, tp).
    """

    def __init__(self, device_type: str, degrees: Degrees) -> None:
        self.device_type, self.degrees = device_type, degrees
        self._mesh = cache(self._make_mesh)
        self.parameters = self._mesh(dp_replicate=degrees.dp_replicate, fsdp=degrees.fsdp)

    @property
    def fsdp(self) -> DeviceMesh:
        """Ranks that FSDP2 shards over; 2-D with the replicas first where there are any."""
        return self.parameters["dp_replicate", "fsdp"] if self.degrees.dp_replicate > 1 else self.parameters["fsdp"]

    @cached_property
    def experts(self) -> tuple[DeviceMesh, DeviceMesh] | None:
        """(Ranks that share the experts, ranks that FSDP2 shards a share over); None: like the rest.

        Of a mesh (pp, dp_replicate, efsdp, ep): tensor-parallel ranks have tokens of their own, and shard experts too.
        """
        if self.degrees.ep == self.degrees.tp == 1:
            return None
        pp, replicas, fsdp, tp = self.parameters.mesh.shape
        shared = self.parameters.mesh.view(pp, replicas, fsdp // self.degrees.ep, self.degrees.ep, tp)
        axes = ("pp", "dp_replicate", "efsdp", "ep")
        own: Any = tuple(_own_group() if axis == "ep" else (None, None) for axis in axes)
        ranks = shared.transpose(3, 4).flatten(2, 3)
        mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=axes, backend_override=own)
        _set_timeouts(mesh)
        sharded = mesh["dp_replicate", "efsdp"] if replicas > 1 else mesh["efsdp"]
        return mesh["ep"], sharded

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """This rank's tensor-parallel peers; None if it has none."""
        return self.parameters["tp"] if self.degrees.tp > 1 else None

    @cached_property
    def pp(self) -> DeviceMesh:
        """The ranks of this rank's pipeline; this rank alone without one."""
        return self.parameters["pp"]

    @property
    def owns_loss(self) -> bool:
        """Whether this rank's losses count in sums over the job: its tensor-parallel peers have the same losses."""
        return self.parameters.get_local_rank("tp") == 0

    @property
    def owns_tokens(self) -> bool:
        """Whether this rank's tokens count in sums over the job: its pipeline reads the same tokens."""
        return self.owns_loss and self.parameters.get_local_rank("pp") == 0

    def for_cp(self, degree: int) -> DeviceMesh:
        """The mesh (pp, dp, cp, tp) with this CP degree. Collective."""
        return self._mesh(dp=self.degrees.dp_replicate * self.degrees.fsdp // degree, cp=degree)

    def for_hybrid(self, degree: int, all_to_all_ranks: int) -> DeviceMesh:
        """The same CP ranks as a 2-D mesh (ring, all-to-all), for the hybrid exchange. Collective."""
        dp = self.degrees.dp_replicate * self.degrees.fsdp // degree
        mesh = self._mesh(dp=dp, ring=degree // all_to_all_ranks, all_to_all=all_to_all_ranks)
        return mesh["ring", "all_to_all"]

    def _make_mesh(self, **data_axes: int) -> DeviceMesh:
        """The mesh (pp, data axes, tp)."""
        axes = {"pp": self.degrees.pp, **data_axes, "tp": self.degrees.tp}
        own: Any = {axis: _own_group() for axis in OWN_GROUPS if axes.get(axis, 1) > 1}
        mesh = init_device_mesh(
            self.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=own
        )
        _set_timeouts(mesh)
        return mesh

    def summary(self) -> str:
        """The axes, and the ranks that share each with this one, a line each."""
        sizes, lines = [], []
        for axis in ("pp", "dp_replicate", "fsdp", "tp"):
            name = "dp_shard x cp" if axis == "fsdp" else axis
            first, *peers = self.parameters[axis].mesh.tolist()
            sizes.append(f"{name} {1 + len(peers)}")
            if peers:
                shown = ", ".join(map(str, peers[:8])) + " ..." * (len(peers) > 8)
                lines.append(f"  rank {first} shares {name} with ranks {shown}")
        if self.degrees.ep > 1:
            sizes.append(f"experts shared by {self.degrees.ep} of dp_shard x cp")
        return "\n".join([f"mesh, outermost first: {', '.join(sizes)}", *lines])


def _own_group() -> tuple[str, Any]:
    """Backend and options of a group apart from the default one, whose messages travel while the GPU computes.

    NCCL's blocks take whole multiprocessors. At the priority of the computation they would get them when the last block
    of an attention kernel has begun, and messages would travel after the computation, not beside it.
    """
    backend, torch_c10d = dist.get_backend(), cast(Any, distributed_c10d)
    return backend, torch_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True) if backend == "nccl" else None


def _set_timeouts(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the default group's timeout; torch gives them its own, of 10 minutes under NCCL."""
    if dist.get_backend() != "fake":  # a dry run's groups never wait
        default: Any = dist.group.WORLD
        timeout = default._get_backend(torch.device(mesh.device_type)).options._timeout
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
