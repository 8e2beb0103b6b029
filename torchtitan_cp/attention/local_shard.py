"""What this rank holds of a tensor that may be a DTensor: its local tensor, and where that lies in the whole.

Importing DTensor takes a second, and a config is checked and planned without one: it is known by its methods.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_slices(tensor: Any) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor, a slice per dim."""
    if hasattr(tensor, "placements"):
        return find_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(0, size) for size in tensor.shape)


def find_shard(shape: Sequence[int], mesh: DeviceMesh, placements: "Sequence[Placement]") -> tuple[slice, ...]:
    """Where this rank's shard of a DTensor of this global shape lies in the whole tensor, a slice per dim.

    The inner axes of the mesh cut first: FSDP cuts what tensor parallelism left. A dim of n entries on r ranks gives
    each rank ceil(n / r) of them, the last ranks fewer or none.
    """
    spans = [(0, size) for size in shape]
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            start, stop = spans[dim]
            per_rank = -(-(stop - start) // mesh.size(axis))
            first = min(start + per_rank * mesh.get_local_rank(axis), stop)
            spans[dim] = (first, min(first + per_rank, stop))
    return tuple(slice(*span) for span in spans)
