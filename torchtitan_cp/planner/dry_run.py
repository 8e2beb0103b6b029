"""One step of each stage by the trainer's own code, as one rank of a job of any size, without a device or data."""

import dataclasses
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.degrees import resolve_degrees, stage_parallel
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.data.batches.loader import MicroBatch
from torchtitan_cp.data.corpus.tokenizer import usable_cores
from torchtitan_cp.parallel import Meshes
from torchtitan_cp.planner.fake import Ledger, Message, WithoutData, fake_job, real
from torchtitan_cp.planner.stage import resolve_with_vocabulary
from torchtitan_cp.runtime import World
from torchtitan_cp.runtime.device import Device
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.resolve import ResolvedRun

logger = logging.getLogger(__name__)

# Blocks that see a micro-batch, in all stages: fewer, each a tenth of a second or two, are walked in one process.
WORTH_PROCESSES = 100
KINDS = ("weights", "gradients", "optimizer", "activations and buffers")


@dataclass(frozen=True)
class StageWalk:
    """What one step of a stage took on one rank.

    Attributes:
        micro_batches: that were walked; a step's others repeat them.
        peak_bytes: most that lived at a time; by_kind: of what, at that moment.
        messages: collectives and how often, over the micro-batches walked.
    """

    stage: StagePlan
    micro_batches: int
    peak_bytes: int
    by_kind: dict[str, int]
    messages: Counter[Message]


class DryModel(ParallelModel):
    """A network whose tensors have no data, and whose steps read nothing."""

    def __init__(self, run: ResolvedRun, world: World, ledger: Ledger, begins: StagePlan) -> None:
        with real():
            meshes = Meshes(world.device.device.type, run.degrees[begins.index])
            meshes.for_cp(1)
        super().__init__(run.config, world, meshes, run.model_args, begins, max(stage.seq_len for stage in run.stages))
        self.ledger, self.tp_and_pp = ledger, (begins.tp, begins.pp)
        self._make_state()

    def _make_state(self) -> None:
        """Weights get their name in the ledger, and the optimizer the state that it has after a first step."""
        for parameter in self.parts.parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.ledger.storages.name(local(parameter), "weights")
        for optimizer in self.optimizers:
            optimizer.step()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.ledger.storages.name(local(value), "optimizer")
        self.zero_grad()

    def walk(self, stage: StagePlan) -> StageWalk:
        """A whole optimizer step of a stage."""
        if self.pipeline:
            self.pipeline.release()  # so that a stage is walked alike, whichever was walked before it
        with real():
            shape = self.enter(stage)
        self.ledger.messages.clear()
        self.ledger.storages.start_peak()
        with real():
            plans = shape.plans()
        rows = (stage.micro_batch_sequences, plans[0].local_tokens)
        # Real, so that the tokens that count can be counted.
        labels = torch.zeros(rows, dtype=torch.int64)
        positions = torch.empty(rows[1], dtype=torch.int64)
        batch = MicroBatch(torch.empty(rows, dtype=torch.int64), labels, positions, plans)
        batches = (batch,) * self._walked(stage)
        self.gradients(batches)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        storages = self.ledger.storages
        messages = Counter(self.ledger.messages)
        return StageWalk(stage, len(batches), storages.peak, dict(storages.at_peak), messages)

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        for parameter in self.parts.parameters():
            if parameter.grad is not None:
                self.ledger.storages.name(local(parameter.grad), "gradients")

    def _walked(self, stage: StagePlan) -> int:
        """Micro-batches that bring every moment of a step: two, or one for each rank of a pipeline."""
        pipeline = self.meshes.pp.size()
        return min(stage.micro_batches, pipeline if pipeline > 1 else 2)


def local(x: Tensor) -> Tensor:
    """A rank's own part."""
    return x.to_local() if isinstance(x, DTensor) else x


def dry_run(config: Config, ranks: int, rank: int = 0) -> list[StageWalk]:
    """Build the real model as one rank of a job, and walk one step of each stage.

    Nothing of it needs the device: tensors have no data and messages go nowhere. Attention runs the CPU kernel's code
    path, and blocks are not compiled. A step too small for so many ranks is a larger one here, which the log says.

    Args:
        ranks: of the job; rank: which of them to be.

    Raises:
        UserError, ContextParallelError: what a run would refuse, or a rank that is none.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} is none of {ranks}", fix=f"use --rank 0 to {ranks - 1}")
    config = dataclasses.replace(
        config,
        compile=dataclasses.replace(config.compile, enable=False),
        context_parallel=dataclasses.replace(config.context_parallel, kernel="auto"),
    )
    run = resolve_with_vocabulary(with_shared_batches(config, ranks), ranks)
    processes = min(usable_cores(), len(run.stages))
    if processes == 1 or _blocks_walked(run) < WORTH_PROCESSES:
        with Walker(run, rank) as walker:
            return [walker.walk(stage) for stage in run.stages]
    # Forked, they know the architectures and log as this one; the bar's thread is started when they are there.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, forked, _begin_walking, (run, rank)) as pool:
        walks = pool.map(_walk, run.stages)
        with Progress(transient=True, disable=not sys.stderr.isatty(), console=Console(stderr=True)) as progress:
            return list(progress.track(walks, len(run.stages), description="stages walked"))


def with_shared_batches(config: Config, ranks: int) -> Config:
    """The config with steps of as many tokens as so many ranks can share, each that had to grow named in the log."""
    stages = []
    for index, stage in enumerate(config.curriculum.stages):
        degrees = resolve_degrees(stage_parallel(config.parallel, stage), ranks)
        divides = degrees.stage_cp(stage) > 0 and degrees.fsdp % degrees.stage_cp(stage) == 0  # else the check says so
        unit = degrees.stage_unit(stage, config.training.micro_batch_sequences) if divides else 0
        if unit and stage.global_batch_tokens % unit:
            needed = -(-stage.global_batch_tokens // unit) * unit
            logger.warning(
                "%d ranks cannot share curriculum.stages[%d].global_batch_tokens = %d, and a run would refuse it; "
                "a step of %d tokens is walked instead",
                *(ranks, index, stage.global_batch_tokens, needed),
            )
            stage = dataclasses.replace(stage, global_batch_tokens=needed)
        stages.append(stage)
    return dataclasses.replace(config, curriculum=dataclasses.replace(config.curriculum, stages=tuple(stages)))


def _blocks_walked(run: ResolvedRun) -> float:
    """About how many blocks of one rank see a micro-batch, over all stages."""
    return sum(run.model_args.n_layers / stage.pp * min(stage.micro_batches, max(stage.pp, 2)) for stage in run.stages)


class Walker:
    """Walks stages of a job one after the other, while it is entered, with one network where the meshes allow it.

    Args:
        rank: which of the run's ranks to be.
    """

    def __init__(self, run: ResolvedRun, rank: int) -> None:
        self.run, self.rank = run, rank
        self.ledger, self.held = Ledger(), ExitStack()
        self.model: DryModel | None = None

    def __enter__(self) -> "Walker":
        for context in (fake_job(self.run.ranks, self.rank), WithoutData(), self.ledger.watching()):
            self.held.enter_context(context)
        return self

    def __exit__(self, *_: object) -> None:
        self.model = None
        self.held.close()

    def walk(self, stage: StagePlan) -> StageWalk:
        """One step of a stage."""
        if self.model and (stage.tp, stage.pp) != self.model.tp_and_pp:
            self.model = None  # its memory goes before the next mesh's, as in a job that starts anew
        if self.model is None:
            world = World(self.rank, self.run.ranks, Device(torch.device("cpu"), "fake"))
            self.model = DryModel(self.run, world, self.ledger, stage)
        return self.model.walk(stage)


_walker: Walker


def _begin_walking(run: ResolvedRun, rank: int) -> None:
    """Make this process of a pool one that walks, until it ends."""
    global _walker
    _walker = Walker(run, rank).__enter__()


def _walk(stage: StagePlan) -> StageWalk:
    return _walker.walk(stage)


def print_walks(console: Console, walks: Sequence[StageWalk], ranks: int, rank: int) -> None:
    """A table of memory, and one of messages for each stage, largest first."""
    memory = Table(
        "stage", "cp", "micro-batches walked", *KINDS, "peak", title=f"rank {rank} of {ranks}, GiB at the peak"
    )
    for walk in walks:
        kinds = [f"{walk.by_kind.get(kind, 0) / 2**30:.2f}" for kind in KINDS]
        batches = f"{walk.micro_batches} of {walk.stage.micro_batches}"
        memory.add_row(walk.stage.name, str(walk.stage.cp), batches, *kinds, f"{walk.peak_bytes / 2**30:.2f}")
    console.print(memory)
    for walk in walks:
        table = Table(
            "operation", "group", "times", "MiB each", "GiB in all", title=f"messages of stage {walk.stage.name}"
        )
        for message, times in sorted(walk.messages.items(), key=lambda item: -item[0].size_bytes * item[1]):
            total = message.size_bytes * times
            table.add_row(
                message.operation,
                message.group,
                str(times),
                f"{message.size_bytes / 2**20:.3f}",
                f"{total / 2**30:.3f}",
            )
        console.print(table)
