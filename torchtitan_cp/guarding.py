"""Looking after the steps of a run: what each was on every rank, and what follows a bad one."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_cp.checkpoint import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.data.loader import MicroBatch
from torchtitan_cp.health import BlockWatch, Injector, Ladder, SpikeDetector, StepReport, exchange
from torchtitan_cp.health.trace import find_ill_weight
from torchtitan_cp.network import Network
from torchtitan_cp.optimizer import square_norms
from torchtitan_cp.parallel import World, any_rank
from torchtitan_cp.studying import Study, keep, study, study_spike

logger = logging.getLogger(__name__)


class Guarding:
    """Watches every step before the optimizers see it. Collective to make.

    Args:
        config: its [health] says how.
        world: this process among the ranks.
        network: that is trained.
        wishes: whether this rank is to stop, and to save, after the step; they travel with its report.

    Attributes:
        ladder: what bad steps have led to so far.
    """

    def __init__(self, config: Config, world: World, network: Network, wishes: Callable[[], tuple[bool, bool]]) -> None:
        self.config, self.settings, self.world, self.network = config, config.health, world, network
        self.watch, self.wishes = BlockWatch(network.parts), wishes
        self.counted = network.counted_by_block()
        vocabulary = network.shape.vocab_size
        self.injector = Injector(config.health.inject, network.parts, world.rank, world.size, vocabulary)
        self.go_on(Progress())

    def go_on(self, progress: Progress) -> None:
        """Know what the run knew there."""
        settings = self.settings
        # Of this stage, since the process began or went back: what a spike is compared with.
        self.newest: tuple[MicroBatch, ...] = ()
        self.healthy: tuple[MicroBatch, ...] = ()
        self.ladder = Ladder(settings, progress.health)
        self.spikes = SpikeDetector(settings.spike_threshold, settings.spike_window, progress.recent)

    def forget_recent(self) -> None:
        """Judge spikes anew, as in a new stage."""
        self.spikes.forget()
        self.healthy = ()

    def told(self, progress: Progress) -> Progress:
        """The progress, with what is known here."""
        return dataclasses.replace(progress, health=dataclasses.asdict(self.ladder.state), recent=self.spikes.recent)

    def gradients(
        self,
        step: int,
        micro_batches: tuple[MicroBatch, ...],
        *,
        again: bool = False,
        within: AbstractContextManager[Any] | None = None,
    ) -> StepReport:
        """Forward and backward of a step, and what every rank has to know of it. Collective.

        Args:
            step: of the run, from 1.
            again: it was run before.
            within: what else watches it.
        """
        network, self.newest = self.network, micro_batches
        micro_batches = self._spoiled(step, micro_batches, again=again)
        with self.injector.armed(step, again=again), within or nullcontext():
            sums = network.gradients(micro_batches)
        outputs, gradient = self.watch.take(network.shape.n_layers, network.device)
        squares = square_norms(self.counted, self.world.size // network.meshes.pp.size())
        memory = self.world.device.peak_memory_bytes()
        report = exchange(sums.loss, sums.tokens, gradient, sums.largest_logit, outputs, squares, memory, self.wishes())
        if self.settings.spike_threshold:
            report = report.judged(self.spikes.judge)
        return report

    def _spoiled(self, step: int, micro_batches: tuple[MicroBatch, ...], *, again: bool) -> tuple[MicroBatch, ...]:
        """The micro-batches, with the fault in the data that is made on purpose, if one is."""
        if not (self.injector.due(step) and self.network.reads_with(self.injector.settings.rank)):
            return micro_batches
        first, *others = micro_batches
        labels = self.injector.spoil(step, first.labels, again=again)
        return dataclasses.replace(first, labels=labels), *others

    def study(
        self, step: int, micro_batches: tuple[MicroBatch, ...], report: StepReport, reseed: Callable[[], None]
    ) -> Study:
        """Repeat a bad step, say what it began with, and keep its tensors. Collective.

        Args:
            reseed: sets the random numbers that the step began with.
        """

        if not report.findings and not self.healthy:
            return Study("no healthy step was taken since the start or the rollback, so its module is not known", False)

        def repeat(number: int, batches: tuple[MicroBatch, ...], within: AbstractContextManager[Any]) -> StepReport:
            reseed()
            try:
                return self.gradients(number, batches, again=True, within=within)
            finally:
                self.network.forget_gradients()

        run, run_healthy = partial(repeat, step, micro_batches), partial(repeat, 0, self.healthy)
        read = self._spoiled(step, micro_batches, again=True)
        if report.findings:
            found = study(self.network, self.world, read, run)
        else:
            found = study_spike(self.network, self.world, read, run, run_healthy)
        state = self.ladder.state
        if state.replays < self.settings.bundles:
            inject = self.injector
            about = {
                "step": step,
                "findings": report.findings or report.spikes,
                "inject": dataclasses.asdict(inject.settings),
                "injected": inject.due(step) and not inject.settings.transient,
                "struck": inject.module,
            }
            bundle = keep(found, self.network, read, run, about)
            folder = Path(self.config.job.dump_folder) / "health" / f"step-{step}"
            if self.world.rank == (found.ranks[0] if found.ranks else 0):
                try:
                    bundle.write(folder)
                except OSError as error:
                    logger.error("the tensors of step %d cannot be written to %s: %s", step, folder, error)
            self.ladder.state = dataclasses.replace(state, replays=state.replays + 1)
            return dataclasses.replace(found, said=f"{found.said}; its tensors are in {folder}")
        return found

    def weights_are_ill(self) -> bool:
        """Whether a weight of any rank is not finite. Collective."""
        return any_rank(find_ill_weight(self.network.parts) is not None, device=self.network.device)[0]

    def is_bad(self, report: StepReport) -> bool:
        """Whether the optimizer must not see the step. Spikes that are let pass are logged."""
        if report.spikes and self.settings.on_spike == "warn" and self.world.rank == 0:
            logger.warning("spike: %s", "; ".join(report.spikes))
        return bool(report.findings or (report.spikes and self.settings.on_spike == "trip"))

    def passed_well(self, report: StepReport) -> None:
        """A step was taken."""
        self.ladder.healthy()
        self.spikes.healthy(report)
        self.healthy = self.newest if self.settings.on_spike == "trip" else ()

    def describe(self, step: int, stage: StagePlan, report: StepReport) -> str:
        """Which step was bad, and why."""
        what = "is not finite" if report.findings else "has spiked"
        findings = "; ".join(report.findings or report.spikes)
        return f"step {step} (stage {stage.index + 1}, {stage.name}) {what}: {findings}"
