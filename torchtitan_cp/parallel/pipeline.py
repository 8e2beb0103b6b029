"""Pipeline parallelism on torch.distributed.pipelining: which layers a stage has, and a step through all of them.

Each stage is a model of its own, cut from the whole, and a rank may have several. What a micro-batch needs
beside its hidden states (tokens, positions, plan) every rank reads for itself, so only hidden states travel.
Source: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., 2021), zero bubble (Qi et al., 2024).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.names import SCHEDULES
from torchtitan_cp.config.sections import Parallel
from torchtitan_cp.parallel.stopwatch import Stopwatch

Span = tuple[int, int]

# Before, torch's split of a backward failed at any autograd.Function (seen with 2.11).
SPLITS_ANY_BACKWARD = TorchVersion(torch.__version__) >= "2.13"


@dataclass(frozen=True)
class Stages:
    """How the layers are dealt out over the pipeline.

    Attributes:
        layers: [first, stop) of each stage.
        owner: the pipeline rank that has each.
    """

    layers: tuple[Span, ...]
    owner: tuple[int, ...]

    def of(self, rank: int) -> list[int]:
        """Numbers of the stages that a pipeline rank has."""
        return [number for number, owner in enumerate(self.owner) if owner == rank]


def plan_stages(settings: Parallel, ranks: int, costs: Sequence[float]) -> Stages:
    """Deal layers out over `ranks` pipeline ranks.

    Args:
        settings: the schedule, stages per rank, and a split by hand.
        costs: of each layer, in any unit; the embedding's and the output's belong to the outer ones.

    Raises:
        ConfigError: more stages than layers, a number of stages the schedule does not take, or a split that is none.
    """
    schedule = SCHEDULES[settings.pp_schedule]
    if ranks > 1 and schedule.splits_backward and not SPLITS_ANY_BACKWARD:
        raise ConfigError(
            f"parallel.pp_schedule = {settings.pp_schedule!r} needs torch 2.13; {torch.__version__} cannot take "
            "the backward of an operator of our own apart",
            fix="use gpipe, 1f1b or interleaved_1f1b",
        )
    per_rank = 1 if ranks == 1 else settings.pp_stages_per_rank or schedule.stages_per_rank
    if ranks > 1 and not schedule.stages_per_rank <= per_rank <= (schedule.most or per_rank):
        takes = str(schedule.stages_per_rank) if schedule.most else f"{schedule.stages_per_rank} or more"
        raise ConfigError(
            f"parallel.pp_stages_per_rank = {per_rank}, and {settings.pp_schedule} takes {takes}",
            fix=f"use {takes}, or another parallel.pp_schedule",
        )
    count = ranks * per_rank
    if count > len(costs):
        raise ConfigError(
            f"a pipeline of {ranks} ranks x {per_rank} stages is longer than the model's {len(costs)} layers",
            fix="lower parallel.pp or parallel.pp_stages_per_rank",
        )
    edges = [0, *settings.pp_split, len(costs)] if settings.pp_split else None
    if edges and (len(edges) != count + 1 or any(stop <= start for start, stop in pairwise(edges))):
        raise ConfigError(
            f"parallel.pp_split = {list(settings.pp_split)} does not cut {len(costs)} layers into {count} stages",
            fix=f"give {count - 1} rising numbers from 1 to {len(costs) - 1}, or leave it out",
        )
    # Stages go round the ranks, or there and back where the schedule is a V.
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    owner = there_and_back[:count] if settings.pp_schedule.startswith("zbv") else [n % ranks for n in range(count)]
    return Stages(tuple(pairwise(edges)) if edges else tuple(split_layers(costs, count)), tuple(owner))


def split_layers(costs: Sequence[float], stages: int) -> list[Span]:
    """[first, stop) of each stage, so that the dearest stage is as cheap as can be; each has a layer at least."""
    layers, before = len(costs), [sum(costs[:count]) for count in range(len(costs) + 1)]
    # best[n]: cost of the dearest stage over the first n layers; cuts: where the last of these stages begins.
    best, cuts = before, []
    for stage in range(1, stages):
        options = {
            stop: min((max(best[cut], before[stop] - before[cut]), cut) for cut in range(stage, stop))
            for stop in range(stage + 1, layers + 1)
        }
        best = [options[stop][0] if stop in options else float("inf") for stop in range(layers + 1)]
        cuts.append({stop: cut for stop, (_, cut) in options.items()})
    edges = [layers]
    for cut_before in reversed(cuts):
        edges.append(cut_before[edges[-1]])
    return list(pairwise([0, *reversed(edges)]))


def bubble_share(settings: Parallel, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Share of a step in which a pipeline rank waits, with backwards twice as long as forwards and free messages.

    Zero-bubble schedules fill the wait with gradients of weights, and are counted as leaving a third of it.
    """
    waits = (ranks - 1) / (3 if SCHEDULES[settings.pp_schedule].splits_backward else 1)
    return waits / (per_rank * micro_batches + waits)


@dataclass(frozen=True)
class Hidden:
    """What travels between stages: `[B, S/cp/tp, E]` of a micro-batch, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Run = Callable[[Callable[..., Any], "Tensor | None", Any], Any]


class _TimedStage(PipelineStage):
    """Torch's, and its watches run while it computes."""

    watches: Mapping[str, Stopwatch]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.watches["forward"].running():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.watches["backward"].running():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.watches["backward"].running():
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """The stages of this rank, and steps through those of all.

    Args:
        parts: this rank's stages, cut and sharded, in order of their numbers.
        stages: of all ranks.
        mesh: 1-D, the pipeline's ranks.
        schedule: a name of SCHEDULES.
        device: of the ranks.
        tied: the output is the embedding, so that the first and the last stage both have it.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stages: Stages,
        mesh: DeviceMesh,
        schedule: str,
        device: torch.device,
        *,
        tied: bool,
    ) -> None:
        self.rank, self.group, self.device = mesh.get_local_rank(), mesh.get_group(), device
        self.ranks = mesh.size()
        self.stages, self.schedule = stages, SCHEDULES[schedule]
        self.parts = dict(zip(stages.of(self.rank), parts, strict=True))
        self.last, self.tied = len(stages.owner) - 1, tied
        self.made: tuple[Hidden, int, Any] | None = None  # torch's schedule, and what it was made for
        self.waiting: dict[int, Iterator[Any]] = {}
        self.watches = {name: Stopwatch(device) for name in ("forward", "backward", "pipeline")}
        for number, part in self.parts.items():
            # The schedule hands a stage its input alone. A stage's forwards come in the order of the micro-batches.
            part.forward = partial(self._forward, number, part.forward)

    @property
    def opens(self) -> bool:
        """Whether this rank has the first stage; `closes`: the last."""
        return 0 in self.parts

    @property
    def closes(self) -> bool:
        return self.last in self.parts

    @property
    def counted(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by name, without those that the first stage counts already."""
        for number, part in self.parts.items():
            twice = self.tied and number == self.last > 0
            yield from (x for x in part.named_parameters() if not (twice and x[0].startswith("tok_embeddings")))

    def step(self, batches: Sequence[Any], hidden: Hidden, run: Run) -> None:
        """Forward and backward of every micro-batch through every stage.

        Args:
            batches: micro-batches, as many on every rank.
            hidden: what travels.
            run: (forward of a stage, hidden states or None for the first, micro-batch) -> hidden states, or of the
                last stage the scalar to differentiate.
        """
        if self.made is None or self.made[:2] != (hidden, len(batches)):
            self.forget()  # its buffers go before the next one's come
            self.made = (hidden, len(batches), self._make(hidden, len(batches)))
        self._begin(batches, run)
        numbers = torch.arange(len(batches), device=self.device)
        target = {"target": numbers} if self.closes else {}
        with self.watches["pipeline"].running():
            self.made[2].step(*((numbers,) if self.opens else ()), **target, return_outputs=False)
        self._add_tied()

    def forget(self) -> None:
        """Let go of the schedule, and of the buffers for what arrives: for steps of another shape."""
        self.made = None

    @torch.no_grad()
    def evaluate(self, batch: Any, hidden: Hidden, run: Run) -> Any:
        """One micro-batch through every stage, without gradients: what the last gives, on its rank; else None."""
        self._begin([batch], run)
        state: Any = None
        for number, owner in enumerate(self.stages.owner):
            following = self.stages.owner[number + 1] if number < self.last else owner
            if owner == self.rank:
                state = self.parts[number](state)
                if following != owner:
                    dist.send(state.contiguous(), group=self.group, group_dst=following)
            elif following == self.rank:
                state = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
                dist.recv(state, group=self.group, group_src=owner)
        return state if self.closes else None

    def _begin(self, batches: Sequence[Any], run: Run) -> None:
        self.waiting, self.run = {number: iter(batches) for number in self.parts}, run

    def _forward(self, number: int, forward: Callable[..., Any], state: Tensor | None) -> Any:
        return self.run(forward, state if number else None, next(self.waiting[number]))

    def _make(self, hidden: Hidden, micro_batches: int) -> Any:
        """Torch's schedule for hidden states of one shape, which is given so that no rank has to find it out."""
        between = torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)
        stages = []
        for number, part in self.parts.items():
            takes = between if number else torch.empty(1, dtype=torch.int64, device="meta")
            gives = between if number < self.last else torch.empty((), device="meta", requires_grad=True)
            stage = _TimedStage(part, number, self.last + 1, self.device, takes, gives, group=self.group)
            stage.watches = self.watches
            stages.append(stage)
        kind = get_schedule_class(self.schedule.torch_name)
        one_or_all: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        return kind(one_or_all, micro_batches, loss_fn=lambda output, target: output, scale_grads=False)

    def _add_tied(self) -> None:
        """Give the first and the last stage the sum of their gradients of an embedding that both have."""
        if not self.tied:
            return
        held: list[Any] = [part.tok_embeddings for part in self.parts.values() if hasattr(part, "tok_embeddings")]
        whole: list[Any] = [embedding.weight.grad for embedding in held]
        gradients: list[Tensor] = [x.to_local() if isinstance(x, DTensor) else x for x in whole]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            peer = self.stages.owner[0] if self.closes else self.stages.owner[-1]
            # Of weights in host memory too, which NCCL does not send.
            own = gradients[0].to(self.device, copy=True)
            other = torch.empty_like(own)
            send = dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            gradients[0].add_(other.to(gradients[0].device))
