"""What the allocator is told of a shard that goes to host memory, and which weights do not go there."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.rank_pool import RankPool
from torchtitan_cp.attention.local_shard import local_tensor
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


class Block(nn.Module):
    """One layer, of which a part is sharded apart, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.first(x).tanh())


def offloaded_kinds() -> list[bool]:
    """On a rank: of each tensor that goes to the host, whether it is a weight."""
    mesh, block, host = init_device_mesh("cpu", (1,)), Block(), HostMemory(torch.device("cpu"), min_bytes=1)
    fully_shard(block.experts, mesh=mesh)
    fully_shard(block, mesh=mesh)
    seen, offload = list[bool](), host.offload

    def offload_and_look(tensor: Tensor) -> Any:
        weights = {local_tensor(x).untyped_storage()._cdata for x in block.parameters()}
        seen.append(tensor.untyped_storage()._cdata in weights)
        return offload(tensor)

    host.offload = offload_and_look  # type: ignore[method-assign]
    block.forward = host.offload_saved(block.forward, block)  # type: ignore[method-assign]
    block(torch.ones(3, 8, requires_grad=True)).sum().backward()
    return seen


def test_gathered_weights_stay_also_those_that_are_gathered_inside_the_block(
    ranks: Callable[[int], RankPool],
) -> None:
    # The input and the output of tanh.
    assert ranks(1)(offloaded_kinds)[0] == [False, False]
