"""Looking after the steps of a run: what each was on every rank, and what follows a bad one."""

import dataclasses
import logging

from torchtitan_cp.checkpoint import Progress
from torchtitan_cp.config import Config
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.data.loader import MicroBatch
from torchtitan_cp.health import BlockWatch, Injector, Ladder, SpikeDetector, StepReport, exchange
from torchtitan_cp.network import Network
from torchtitan_cp.optimizer import square_norms
from torchtitan_cp.parallel import World

logger = logging.getLogger(__name__)


class Guarding:
    """Watches every step before the optimizers see it. Collective to make.

    Args:
        config: its [health] says how.
        world: this process among the ranks.
        network: that is trained.

    Attributes:
        ladder: what bad steps have led to so far.
    """

    def __init__(self, config: Config, world: World, network: Network) -> None:
        self.settings, self.world, self.network = config.health, world, network
        self.watch = BlockWatch(network.parts)
        self.counted = network.counted_by_block()
        vocabulary = network.shape.vocab_size
        self.injector = Injector(config.health.inject, network.parts, world.rank, world.size, vocabulary)
        self.go_on(Progress())

    def go_on(self, progress: Progress) -> None:
        """Know what the run knew there."""
        settings = self.settings
        self.ladder = Ladder(settings, progress.health)
        self.spikes = SpikeDetector(settings.spike_threshold, settings.spike_window, progress.recent)

    def forget_recent(self) -> None:
        """Judge spikes anew, as in a new stage."""
        self.spikes.forget()

    def told(self, progress: Progress) -> Progress:
        """The progress, with what is known here."""
        return dataclasses.replace(progress, health=dataclasses.asdict(self.ladder.state), recent=self.spikes.recent)

    def gradients(self, step: int, micro_batches: tuple[MicroBatch, ...], *, again: bool = False) -> StepReport:
        """Forward and backward of a step, and what every rank has to know of it. Collective.

        Args:
            step: of the run, from 1.
            again: it was run before.
        """
        network, inject = self.network, self.settings.inject
        if self.injector.due(step) and network.reads_with(inject.rank):
            first, *others = micro_batches
            labels = self.injector.spoil(step, first.labels, again=again)
            micro_batches = (dataclasses.replace(first, labels=labels), *others)
        with self.injector.armed(step, again=again):
            sums = network.gradients(micro_batches)
        outputs, gradient = self.watch.take(network.shape.n_layers, network.device)
        squares = square_norms(self.counted, self.world.size // network.meshes.pp.size())
        memory = self.world.device.peak_memory_bytes()
        report = exchange(sums.loss, sums.tokens, gradient, sums.largest_logit, outputs, squares, memory)
        if self.settings.spike_threshold:
            report = report.judged(self.spikes.judge)
        return report

    def is_bad(self, report: StepReport) -> bool:
        """Whether the optimizer must not see the step. Spikes that are let pass are logged."""
        if report.spikes and self.settings.on_spike == "warn" and self.world.rank == 0:
            logger.warning("spike: %s", "; ".join(report.spikes))
        return bool(report.findings or (report.spikes and self.settings.on_spike == "trip"))

    def passed_well(self, report: StepReport) -> None:
        """A step was taken."""
        self.ladder.healthy()
        self.spikes.healthy(report)

    def describe(self, step: int, stage: StagePlan, report: StepReport) -> str:
        """Which step was bad, and why."""
        what = "is not finite" if report.findings else "has spiked"
        findings = "; ".join(report.findings or report.spikes)
        return f"step {step} (stage {stage.index + 1}, {stage.name}) {what}: {findings}"
