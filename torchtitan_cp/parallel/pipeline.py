"""Pipeline parallelism on torch.distributed.pipelining: a step through all pipeline stages.

A pipeline stage is a model of its own with some of the layers, and a rank may have several. Every rank reads the
tokens, positions and plans of all micro-batches, so only hidden states travel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.names import SCHEDULES
from torchtitan_cp.parallel.pipeline_stages import PipelineStages
from torchtitan_cp.parallel.stopwatch import Stopwatch

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti
Batch = TypeVar("Batch")
Forward = Callable[..., object]  # of a part of the model
# (forward of a pipeline stage, hidden states or None for the first, micro-batch) -> what the pipeline stage returns
RunPart = Callable[[Forward, Tensor | None, Batch], object]


class _TimedStage(PipelineStage):
    """torch's pipeline stage, with a stopwatch running while it computes.

    It overrides methods instead of replacing them on the object: an attribute that refers to its own object would keep
    the receive buffers until the garbage collector runs.
    """

    watches: Mapping[str, Stopwatch]

    def forward_maybe_with_nosync(self, *args: object, **kwargs: object) -> object:
        with self.watches["forward"].running():
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.watches["backward"].running():
            return super().backward_maybe_with_nosync(*args, **kwargs)


class Pipeline(Generic[Batch]):
    """This rank's pipeline stages, and steps through those of all ranks.

    Args:
        parts: this rank's parts of the model, sharded, one for each of its pipeline stages.
        stages: which layers and which rank each pipeline stage has.
        mesh: 1-D, the pipeline's ranks.
        schedule: a name of SCHEDULES.
        tied: the output layer is the embedding, so that the first and the last pipeline stage both have it.

    Attributes:
        parts: by number of the pipeline stage.
        has_first, has_last: whether this rank has the first and the last pipeline stage.
        watches: time of forwards, of backwards, and of whole steps.
    """

    def __init__(
        self,
        parts: Sequence[LanguageModel],
        stages: PipelineStages,
        mesh: DeviceMesh,
        schedule: str,
        device: torch.device,
        *,
        tied: bool,
    ) -> None:
        self.rank, self.group, self.device = mesh.get_local_rank(), mesh.get_group(), device
        self.ranks = mesh.size()
        self.stages, self.schedule = stages, SCHEDULES[schedule]
        self.parts = dict(zip(stages.of_rank(self.rank), parts, strict=True))
        self.last_stage, self.tied = len(stages.owner) - 1, tied
        self.has_first, self.has_last = 0 in self.parts, self.last_stage in self.parts
        # What it was made for, and torch's schedule.
        self.torch_schedule: tuple[tuple[torch.Size, torch.dtype, int], TorchSchedule] | None = None
        self.watches = {name: Stopwatch(device) for name in ("forward", "backward", "pipeline")}
        for number, part in self.parts.items():
            # torch gives a pipeline stage only its input, and calls its forwards in the order of the micro-batches.
            vars(part)["forward"] = partial(self._forward, number, part.forward)

    def unique_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by name, without a tied output: it is the first pipeline stage's embedding."""
        for number, part in self.parts.items():
            skips_tied = self.tied and number == self.last_stage > 0
            yield from (x for x in part.named_parameters() if not (skips_tied and x[0].startswith("tok_embeddings")))

    def train_step(self, batches: Sequence[Batch], hidden: Tensor, run_part: RunPart[Batch]) -> None:
        """Forward and backward of every micro-batch through every pipeline stage.

        Args:
            batches: micro-batches, equally many on every rank.
            hidden: shape and dtype of a micro-batch's hidden states `[B, S/cp/tp, E]`, on meta.
            run_part: returns hidden states, or from the last pipeline stage a scalar to call backward on.
        """
        made_for = hidden.shape, hidden.dtype, len(batches)
        if self.torch_schedule is None or self.torch_schedule[0] != made_for:
            self.release()  # frees its buffers before the next ones are made
            self.torch_schedule = made_for, self._make_schedule(hidden, len(batches))
        self._begin(batches, run_part)
        numbers = torch.arange(len(batches), device=self.device)
        target = numbers if self.has_last else None
        with self.watches["pipeline"].running():
            self.torch_schedule[1].step(*((numbers,) if self.has_first else ()), target=target, return_outputs=False)
        self._add_tied()

    def release(self) -> None:
        """Free the schedule and its receive buffers; the next step makes them again."""
        self.torch_schedule = None

    @torch.no_grad()
    def evaluate(self, batch: Batch, hidden: Tensor, run_part: RunPart[Batch]) -> object:
        """One micro-batch through every pipeline stage, without gradients.

        Returns:
            What the last pipeline stage returns, on its rank; None on the others.
        """
        self._begin([batch], run_part)
        state: Tensor | None = None
        for number, owner in enumerate(self.stages.owner):
            next_owner = self.stages.owner[number + 1] if number < self.last_stage else owner
            if owner == self.rank:
                state = self.parts[number](state)
                if next_owner != owner:
                    dist.send(state.contiguous(), group=self.group, group_dst=next_owner)
            elif next_owner == self.rank:
                state = torch.empty_like(hidden, device=self.device)
                dist.recv(state, group=self.group, group_src=owner)
        return state if self.has_last else None

    def _begin(self, batches: Sequence[Batch], run_part: RunPart[Batch]) -> None:
        self.batches, self.run_part = {number: iter(batches) for number in self.parts}, run_part

    def _forward(self, number: int, forward: Forward, state: Tensor | None) -> object:
        return self.run_part(forward, state if number else None, next(self.batches[number]))

    def _make_schedule(self, hidden: Tensor, micro_batches: int) -> TorchSchedule:
        """torch's schedule for hidden states of one shape, which torch would otherwise infer by a forward."""
        between = hidden.detach().requires_grad_()
        stages = []
        for number, part in self.parts.items():
            received = between if number else torch.empty(1, dtype=torch.int64, device="meta")
            sent = between if number < self.last_stage else torch.empty((), device="meta", requires_grad=True)
            stage = _TimedStage(part, number, self.last_stage + 1, self.device, received, sent, group=self.group)
            stage.watches = self.watches
            stages.append(stage)
        schedule = get_schedule_class(self.schedule.torch_name)
        one_or_all = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
        return schedule(one_or_all, micro_batches, loss_fn=lambda output, target: output, scale_grads=False)

    def _add_tied(self) -> None:
        """Give the first and the last pipeline stage the sum of their gradients of a tied embedding."""
        if not self.tied:
            return
        embeddings = [part.tok_embeddings for part in self.parts.values() if hasattr(part, "tok_embeddings")]
        weights = [next(embedding.parameters()) for embedding in embeddings]
        gradients = [local_tensor(weight.grad) for weight in weights if weight.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            peer = self.stages.owner[0] if self.has_last else self.stages.owner[-1]
            # NCCL does not send from host memory, where gradients may be.
            sent = gradients[0].to(self.device, copy=True)
            other = torch.empty_like(sent)
            send = dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            gradients[0].add_(other.to(gradients[0].device))
