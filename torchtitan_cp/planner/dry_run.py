"""One step of each stage by the trainer's own code, as one rank of a job of any size, without a device or data."""

import dataclasses
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchtitan_cp.attention import prepare_plan
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.names import format_bytes
from torchtitan_cp.curriculum import ResolvedStage, resolve_stages
from torchtitan_cp.data.batches.micro_batches import MicroBatch
from torchtitan_cp.data.corpus.tokenizer import usable_cores
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.pipeline import Forward
from torchtitan_cp.planner.fake import WORKING, FakeMode, Message, StepTracker, fake_flex, fake_job
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.runtime.device import Device, World, find_device
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.resolve import ResolvedRun, resolve_run

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # between two lines about one step
KINDS = ("weights", "gradients", "optimizer", WORKING)


class StageWalk(NamedTuple):
    """Memory and messages of one step of a stage on one rank.

    Attributes:
        micro_batches: how many were walked; the step's others repeat them.
        peak_bytes: most at a time; by_kind: of what, at that moment.
        messages: collective -> how often, over the micro-batches walked.
    """

    stage: ResolvedStage
    micro_batches: int
    peak_bytes: int
    by_kind: dict[str, int]
    messages: Counter[Message]

    @property
    def part(self) -> str:
        """Of the step's micro-batches, how many were walked."""
        return f"{self.micro_batches} of {self.stage.micro_batches}"


class DryModel(ParallelModel):
    """The model of one rank, with tensors that `fake` makes and `tracker` counts."""

    def __init__(
        self, run: ResolvedRun, world: World, fake: FakeMode, tracker: StepTracker, stage: ResolvedStage
    ) -> None:
        with fake.real_tensors():
            meshes = Meshes(world.device.device.type, stage.degrees)
        super().__init__(run, world, meshes, stage)
        self.fake, self.tracker, self.tp_and_pp = fake, tracker, (stage.tp, stage.pp)
        for parameter in self.parts.parameters():
            tracker.set_kind(parameter, "weights")
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(lambda reduced: tracker.set_kind(reduced.grad, "gradients"))
        for optimizer in self.optimizers:
            optimizer.step()
        for value in self.state_tensors():
            tracker.set_kind(value, "optimizer")
        self.zero_grad()

    def walk(self, stage: ResolvedStage) -> StageWalk:
        """A whole optimizer step of a stage."""
        if self.pipeline:
            self.pipeline.release()  # what an earlier stage left
        with self.fake.real_tensors():
            plans = self.configure_stage(stage).plans()
            for plan in plans.values():
                prepare_plan(plan)
        self.tracker.start_peak()
        rows = (stage.micro_batch_sequences, plans[0].local_tokens)
        tokens, labels, positions = (torch.empty(shape, dtype=torch.int64) for shape in (rows, rows, rows[1:]))
        batch = MicroBatch(tokens, labels, positions, plans)
        batches = (batch,) * int(min(stage.micro_batches, self._repeats_after()))
        self.forwards, self.all_forwards = 0, len(batches) * len(self.parts)
        self.last_line, self.step_of = time.monotonic(), _numbered(stage)
        others = self._receive_buffers(batch, stage.micro_batches - len(batches))
        self.forward_backward(batches)
        self.update(lr=0.0, grad_norm=0.0)
        del others
        return StageWalk(stage, len(batches), self.tracker.peak, self.tracker.at_peak, Counter(self.tracker.messages))

    def _train_part(
        self, divisor: Tensor, loss_sum: Tensor, forward: Forward, hidden: Tensor | None, batch: MicroBatch
    ) -> Tensor:
        self.forwards += 1
        if (now := time.monotonic()) - self.last_line > LINE_SECONDS:
            self.last_line = now
            logger.info("%s: forward %d of %d", self.step_of, self.forwards, self.all_forwards)
        return super()._train_part(divisor, loss_sum, forward, hidden, batch)

    def _repeats_after(self) -> float:
        """Micro-batches after which the memory of a step repeats.

        A plain pipeline first runs a forward for each rank; its second backward finds as many activations as the first,
        and the first one's gradients.
        """
        ranks, schedule = self.meshes.pp.size(), self.config.parallel.pp_schedule
        return 2 if ranks == 1 else (ranks + 1 if schedule == "1f1b" else 2 * ranks)

    def _receive_buffers(self, batch: MicroBatch, micro_batches: int) -> list[torch.Tensor]:
        """What a pipeline's stages receive in micro-batches that are not walked; torch makes all buffers beforehand."""
        if not self.pipeline:
            return []
        last = self.pipeline.last_stage
        count = micro_batches * sum((number > 0) + (number < last) for number in self.pipeline.parts)
        return [torch.empty_like(self._hidden(batch), device=self.world.device.device) for _ in range(count)]


def dry_run(config: Config, ranks: int, rank: int = 0) -> list[StageWalk]:
    """Build the model as one rank of a job and run one step of each stage with fake tensors, without a device.

    Operations are those of the CPU, and attention takes the CPU kernel's path. Blocks are not compiled; the loss has
    the chunks of a run on this machine. A step too small for so many ranks is made larger, and the log says so.

    Args:
        ranks: of the job; rank: the one to be.

    Raises:
        UserError, ContextParallelError: what a run would refuse, or a rank outside the job.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"there is no rank {rank} among {ranks}", fix=f"use --rank 0 to {ranks - 1}")
    config = config.with_keys(context_parallel={"kernel": "auto"})
    device = find_device().device.type
    run = resolve_run(with_shared_batches(config, ranks), ranks, sized_model_args(config), device=device)
    run = dataclasses.replace(run, config=run.config.with_keys(compile={"enable": False}, parallel={"async_tp": False}))
    processes = min(usable_cores(), len(run.stages))
    logger.info("one step of each stage, %d in all, as rank %d of %d, on fake tensors", len(run.stages), rank, ranks)
    with stage_walker(run, rank) as walk:
        global _walk_stage
        _walk_stage = walk
        if processes == 1:
            return [_walk(stage) for stage in run.stages]
        # Each forked process is the rank too.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_walk, run.stages))


def with_shared_batches(config: Config, ranks: int) -> Config:
    """The config with every step large enough for so many ranks; logs each that is enlarged."""
    stages = []
    for stage, resolved in zip(config.curriculum.stages, resolve_stages(config, ranks), strict=True):
        needed = -(-stage.global_batch_tokens // resolved.round_tokens) * resolved.round_tokens
        if needed > stage.global_batch_tokens:
            logger.warning(
                "%d ranks cannot share %s.global_batch_tokens = %d, and a run would refuse it; the dry run uses a step "
                "of %d tokens instead",
                *(ranks, resolved.where, stage.global_batch_tokens, needed),
            )
        stages.append(dataclasses.replace(stage, global_batch_tokens=needed))
    return config.with_keys(curriculum={"stages": tuple(stages)})


@contextmanager
def stage_walker(
    run: ResolvedRun, rank: int, device: str = "cpu", mode: type[FakeMode] = FakeMode
) -> Iterator[Callable[[ResolvedStage], StageWalk]]:
    """Be one rank of a job. Yields what walks a stage, with one model while tp and pp stay the same.

    Args:
        device: type of the device that tensors claim to be on; mode: what makes them.
    """
    # A real tensor may be an argument beside fake ones.
    fake, tracker, models = mode(allow_non_fake_inputs=True), StepTracker(device), list[DryModel]()

    def walk(stage: ResolvedStage) -> StageWalk:
        if models and models[0].tp_and_pp != (stage.tp, stage.pp):
            models.clear()  # frees its memory first, as a relaunch does
        if not models:
            world = World(rank, run.ranks, Device(torch.device(device), "fake"))
            models.append(DryModel(run, world, fake, tracker, stage))
        return models[0].walk(stage)

    eager = torch.compiler.set_stance("force_eager")  # torchao compiles its optimizers
    with fake_job(run.ranks, rank), fake, tracker.tracking(), eager, fake_flex():
        yield walk
        models.clear()


_walk_stage: Callable[[ResolvedStage], StageWalk]


def _walk(stage: ResolvedStage) -> StageWalk:
    """Walk a stage, maybe in a process of a pool, and log when it begins and ends."""
    logger.info("%s: begins", _numbered(stage))
    begun = time.monotonic()
    walked = _walk_stage(stage)
    seconds, peak = time.monotonic() - begun, format_bytes(walked.peak_bytes)
    logger.info("%s: done in %.0f s, %s at the peak", _numbered(stage), seconds, peak)
    return walked


def _numbered(stage: ResolvedStage) -> str:
    return f"stage {stage.index + 1} ({stage.name})"


def print_walks(console: Console, walks: Sequence[StageWalk], ranks: int, rank: int) -> None:
    """Print a table of memory, and one of messages for each stage, largest first."""
    memory = Table("stage", "cp", "micro-batches run", *KINDS, "peak", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    memory.title = f"rank {rank} of {ranks}, GiB at the peak"
    for walk in walks:
        kinds = [f"{walk.by_kind.get(kind, 0) / 2**30:.2f}" for kind in KINDS]
        kinds.append(f"{walk.peak_bytes / 2**30:.2f}")
        memory.add_row(walk.stage.name, str(walk.stage.cp), walk.part, *kinds)
    console.print(memory)
    for walk in walks:
        table = Table("operation", "group", "times", "MiB each", "GiB in all")
        table.title = f"messages of stage {walk.stage.name} in {walk.part} micro-batches"
        for message, times in sorted(walk.messages.items(), key=lambda item: -item[0].size_bytes * item[1]):
            sizes = f"{message.size_bytes / 2**20:.3f}", f"{message.size_bytes * times / 2**30:.3f}"
            table.add_row(message.operation, message.group, str(times), *sizes)
        console.print(table)
