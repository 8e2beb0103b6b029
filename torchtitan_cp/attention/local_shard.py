"""What this rank holds of a tensor that may be a DTensor: its local tensor, and where that lies in the full tensor.

Importing DTensor takes a second, which checking and planning a config should not: it is recognized by its methods.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor is returned as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the full tensor, a slice per dim."""
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        return find_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(0, size) for size in tensor.shape)


def find_shard(shape: Sequence[int], mesh: DeviceMesh, placements: "Sequence[Placement]") -> tuple[slice, ...]:
    """Where this rank's shard of a DTensor with this global shape lies in the full tensor, a slice per dim.

    The inner axes of the mesh cut first: FSDP cuts what tensor parallelism left. Of n entries of a dim, each of r ranks
    gets ceil(n / r); the last ranks get fewer or none.
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
