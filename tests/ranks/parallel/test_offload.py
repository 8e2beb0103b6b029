"""What the allocator is told of a shard that goes to host memory."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.rank_pool import RankPool
from torchtitan_cp.parallel.offload import HostMemory


def test_the_allocator_is_told_of_a_shard_and_not_of_what_it_is_a_part_of(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(1)(recorded_kinds)[0] == [Tensor, Tensor]


def recorded_kinds() -> list[type]:
    """On a rank: which tensors are recorded for a stream, of a DTensor that is offloaded and comes back."""
    seen, host = list[type](), HostMemory(torch.device("cpu"))
    host.stream = stream = SimpleNamespace(wait_stream=lambda other: None)  # type: ignore[assignment]
    whole = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.cuda, "current_stream", lambda *_: stream))
        patches.enter_context(patch.object(torch.cuda, "stream", lambda *_: nullcontext()))
        patches.enter_context(patch.object(Tensor, "record_stream", lambda self, stream: seen.append(type(self))))
        with host.copy_stream(whole):
            host.wait_for(whole)
    return seen
