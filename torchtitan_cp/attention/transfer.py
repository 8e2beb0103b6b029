"""Messages between the ranks of a group: the only place of the library that touches torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan_cp.attention.errors import PlanError


def find_group(name: str | None) -> dist.ProcessGroup:
    """The process group registered under `name`.

    A plan carries the name and not the group, so that it stays plain data.

    Raises:
        PlanError: there is none.
    """
    if name is None:
        raise PlanError("this plan has no process group", fix="make it with ContextParallel.plan, on every rank")
    registered: Any = name
    return _resolve_process_group(registered)


def gather(x: Tensor, ranks: int, group_name: str | None) -> list[Tensor]:
    """Every rank's tensor of the same shape, in rank order."""
    shards = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(ranks)]
    dist.all_gather(shards, x.contiguous(), group=find_group(group_name))
    return shards


class Transfer:
    """A send and a receive in flight between this rank and two others of its group; either may be None.

    Args:
        group: the process group; `to` and `source` are ranks within it.
        send: contiguous tensor for rank `to`.
        receive: buffer that rank `source` fills.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, send: Tensor | None, to: int, receive: Tensor | None, source: int
    ) -> None:
        # Kept until wait(): the transport reads and writes them meanwhile.
        self.buffers = (send, receive)
        operations = []
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=to))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=source))
        self.pending = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """What was received, once the send has gone too (on CUDA: once the stream may use it)."""
        for work in self.pending:
            work.wait()
        return self.buffers[1]
