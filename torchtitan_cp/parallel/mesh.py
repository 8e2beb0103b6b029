"""Meshes of a run: one that parameters are sharded over, and one for each context-parallel degree of its stages."""

import math
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from torchtitan_cp.config.degrees import Degrees

# Axes whose groups we make. torch would give an axis that spans the world the default group, which FSDP also uses.
OWN_GROUPS = ("cp", "ring", "all_to_all", "ep")


class Meshes:
    """Meshes over all ranks of the job.

    Ranks are numbered with tensor parallelism innermost, so that its ranks share a node, then context parallelism,
    then the rest. Parameters are sharded over the flattened (dp_shard, cp) ranks, whose product no stage changes; a
    stage with another CP degree only gets other groups, which are made when it starts, and kept.

    Context parallelism shares its groups with nothing else: an NCCL group runs its messages one after another, and keys
    and values must not wait behind the weights that FSDP2 gathers. All groups have the default group's timeout.

    Args:
        device_type: "cpu" or "cuda".
        degrees: of every axis.

    Attributes:
        parameters: (pp, dp_replicate, fsdp, tp); ranks: of the job, in these axes.
    """

    def __init__(self, device_type: str, degrees: Degrees) -> None:
        self.device_type, self.degrees = device_type, degrees
        sizes = degrees.pp, degrees.dp_replicate, degrees.fsdp, degrees.tp
        self.ranks = torch.arange(math.prod(sizes)).view(sizes)
        self.parameters = self._make_mesh(self.ranks, "pp", "dp_replicate", "fsdp", "tp")
        self._sequence_mesh = cache(self._make_sequence_mesh)

    @property
    def fsdp(self) -> DeviceMesh:
        """Ranks that FSDP2 shards over; 2-D with the replicas first where there are any."""
        return self.parameters["dp_replicate", "fsdp"] if self.degrees.dp_replicate > 1 else self.parameters["fsdp"]

    @cached_property
    def experts(self) -> tuple[DeviceMesh, DeviceMesh] | None:
        """(Ranks that share the experts, ranks that FSDP2 shards each share over); None: like the rest.

        They are axes of a mesh (pp, dp_replicate, efsdp, ep). Tensor-parallel ranks are part of efsdp, since each
        computes experts for its own part of the sequence.
        """
        if self.degrees.ep == self.degrees.tp == 1:
            return None
        pp, replicas, fsdp, tp = self.ranks.shape
        shared = self.ranks.view(pp, replicas, fsdp // self.degrees.ep, self.degrees.ep, tp)
        mesh = self._make_mesh(shared.transpose(3, 4).flatten(2, 3), "pp", "dp_replicate", "efsdp", "ep")
        sharded = mesh["dp_replicate", "efsdp"] if replicas > 1 else mesh["efsdp"]
        return mesh["ep"], sharded

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """This rank's tensor-parallel peers; None if it has none."""
        return self.parameters["tp"] if self.degrees.tp > 1 else None

    @cached_property
    def pp(self) -> DeviceMesh:
        """The ranks of this rank's pipeline; without a pipeline this rank alone."""
        return self.parameters["pp"]

    @property
    def owns_loss(self) -> bool:
        """Whether this rank's losses count in sums over the job: its tensor-parallel peers have the same losses."""
        return self.parameters.get_local_rank("tp") == 0

    @property
    def owns_tokens(self) -> bool:
        """Whether this rank's tokens count in sums over the job: its pipeline reads the same tokens."""
        return self.owns_loss and self.parameters.get_local_rank("pp") == 0

    def coordinate(self, rank: int, degree: int) -> tuple[int, int, int]:
        """A rank's coordinate along (pp, dp, cp) with this CP degree."""
        pp, data = divmod(rank // self.degrees.tp, self.degrees.dp_replicate * self.degrees.fsdp)
        return pp, *divmod(data, degree)

    def for_cp(self, degree: int) -> DeviceMesh:
        """The ranks that share this rank's sequences with this CP degree. Collective."""
        return self._sequence_mesh(cp=degree)

    def for_hybrid(self, degree: int, all_to_all_ranks: int) -> DeviceMesh:
        """The same ranks as a 2-D mesh (ring, all-to-all), for the hybrid exchange. Collective."""
        return self._sequence_mesh(ring=degree // all_to_all_ranks, all_to_all=all_to_all_ranks)

    def _make_sequence_mesh(self, **axes: int) -> DeviceMesh:
        """A mesh with these axes. Beside their groups it makes one more, of the axis "others"."""
        ranks = self.ranks.view(-1, *axes.values(), self.degrees.tp).movedim(-1, 1).flatten(0, 1)
        return self._make_mesh(ranks, "others", *axes)[tuple(axes)]

    def _make_mesh(self, ranks: Tensor, *axes: str) -> DeviceMesh:
        backends = tuple(
            _own_group() if axis in OWN_GROUPS and size > 1 else (None, None)
            for axis, size in zip(axes, ranks.shape, strict=True)
        )
        mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=axes, backend_override=backends)
        if dist.get_backend() != "fake":  # a dry run's groups never wait
            # torch gives them a timeout of its own, of 10 minutes under NCCL.
            default = dist.group.WORLD
            assert default
            timeout = default._get_backend(torch.device(self.device_type)).options._timeout
            for group in mesh.get_all_groups():
                _set_pg_timeout(timeout, group)
        return mesh

    def summary(self) -> str:
        """The sizes of the axes."""
        pp, replicas, fsdp, tp = self.ranks.shape
        experts = f", experts shared by {self.degrees.ep} of dp_shard x cp" if self.degrees.ep > 1 else ""
        return f"mesh, outermost first: pp {pp}, dp_replicate {replicas}, dp_shard x cp {fsdp}, tp {tp}{experts}"


def _own_group() -> tuple[str, Any]:
    """Backend and options of a group apart from the default one, whose messages travel while the GPU computes.

    NCCL's blocks take whole multiprocessors. At the same priority as the computation they would get them only once the
    last block of an attention kernel has begun, and messages would travel after the computation, not beside it.
    """
    backend = dist.get_backend()
    if backend != "nccl":
        return backend, None
    return backend, distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
