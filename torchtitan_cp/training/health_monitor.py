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
from torchtitan_cp.data.batches.loader import MicroBatch
from torchtitan_cp.health import BlockWatch, Injector, RecoveryPolicy, SpikeDetector, StepReport, all_gather_report
from torchtitan_cp.health.trace import find_nonfinite_weight
from torchtitan_cp.optim import square_norms
from torchtitan_cp.runtime import World, any_rank
from torchtitan_cp.training.diagnosis import Diagnosis, diagnose, diagnose_spike, keep
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)


class HealthMonitor:
    """Watches every step before the optimizers see it. Collective to make.

    Args:
        config: its [health] says how.
        world: this process among the ranks.
        network: that is trained.
        wishes: whether this rank is to stop, and to save, after the step; they travel with its report.

    Attributes:
        ladder: what bad steps have led to so far.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: ParallelModel,
        stop_and_save_requests: Callable[[], tuple[bool, bool]],
    ) -> None:
        self.config, self.settings, self.world, self.model = config, config.health, world, model
        self.watch, self.stop_and_save_requests = BlockWatch(model.parts), stop_and_save_requests
        self.counted = model.grad_norm_groups()
        vocabulary = model.args.vocab_size
        self.injector = Injector(config.health.inject, model.parts, world.rank, world.size, vocabulary)
        self.load_state(Progress())

    def load_state(self, progress: Progress) -> None:
        """Know what the run knew there."""
        settings = self.settings
        # Of this stage, since the process began or went back: what a spike is compared with.
        self.newest: tuple[MicroBatch, ...] = ()
        self.healthy: tuple[MicroBatch, ...] = ()
        self.recovery_policy = RecoveryPolicy(settings, progress.health)
        self.spikes = SpikeDetector(settings.spike_threshold, settings.spike_window, progress.recent)

    def forget_recent(self) -> None:
        """Judge spikes anew, as in a new stage."""
        self.spikes.forget()
        self.healthy = ()

    def with_health_state(self, progress: Progress) -> Progress:
        """The progress, with what is known here."""
        return dataclasses.replace(
            progress, health=dataclasses.asdict(self.recovery_policy.state), recent=self.spikes.recent
        )

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
        model, self.newest = self.model, micro_batches
        micro_batches = self._corrupted(step, micro_batches, again=again)
        with self.injector.armed(step, again=again), within or nullcontext():
            sums = model.gradients(micro_batches)
        outputs, gradient = self.watch.take(model.args.n_layers, model.device)
        squares = square_norms(self.counted, self.world.size // model.meshes.pp.size())
        memory = self.world.device.peak_memory_bytes()
        report = all_gather_report(
            sums.loss,
            sums.tokens,
            gradient,
            sums.largest_logit,
            outputs,
            squares,
            memory,
            self.stop_and_save_requests(),
        )
        if self.settings.spike_threshold:
            report = report.judged(self.spikes.judge)
        return report

    def _corrupted(self, step: int, micro_batches: tuple[MicroBatch, ...], *, again: bool) -> tuple[MicroBatch, ...]:
        """The micro-batches, with the fault in the data that is made on purpose, if one is."""
        if not (self.injector.due(step) and self.model.shares_batch_with(self.injector.settings.rank)):
            return micro_batches
        first, *others = micro_batches
        labels = self.injector.corrupt(step, first.labels, again=again)
        return dataclasses.replace(first, labels=labels), *others

    def diagnose(
        self, step: int, micro_batches: tuple[MicroBatch, ...], report: StepReport, reseed: Callable[[], None]
    ) -> Diagnosis:
        """Repeat a bad step, say what it began with, and keep its tensors. Collective.

        Args:
            reseed: sets the random numbers that the step began with.
        """

        if not report.findings and not self.healthy:
            return Diagnosis(
                "no healthy step was taken since the start or the rollback, so its module is not known", False
            )

        def repeat(number: int, batches: tuple[MicroBatch, ...], within: AbstractContextManager[Any]) -> StepReport:
            reseed()
            try:
                return self.gradients(number, batches, again=True, within=within)
            finally:
                self.model.zero_grad()

        run, run_healthy = partial(repeat, step, micro_batches), partial(repeat, 0, self.healthy)
        read = self._corrupted(step, micro_batches, again=True)
        if report.findings:
            found = diagnose(self.model, self.world, read, run)
        else:
            found = diagnose_spike(self.model, self.world, read, run, run_healthy)
        state = self.recovery_policy.state
        if state.replays < self.settings.bundles:
            inject = self.injector
            about = {
                "step": step,
                "findings": report.findings or report.spikes,
                "inject": dataclasses.asdict(inject.settings),
                "injected": inject.due(step) and not inject.settings.transient,
                "struck": inject.module,
            }
            bundle = keep(found, self.model, read, run, about)
            folder = Path(self.config.job.dump_folder) / "health" / f"step-{step}"
            if self.world.rank == (found.ranks[0] if found.ranks else 0):
                try:
                    bundle.write(folder)
                except OSError as error:
                    logger.error("the tensors of step %d cannot be written to %s: %s", step, folder, error)
            self.recovery_policy.state = dataclasses.replace(state, replays=state.replays + 1)
            return dataclasses.replace(found, said=f"{found.said}; its tensors are in {folder}")
        return found

    def has_nonfinite_weights(self) -> bool:
        """Whether a weight of any rank is not finite. Collective."""
        return any_rank(find_nonfinite_weight(self.model.parts) is not None, device=self.model.device)[0]

    def is_bad(self, report: StepReport) -> bool:
        """Whether the optimizer must not see the step. Spikes that are let pass are logged."""
        if report.spikes and self.settings.on_spike == "warn" and self.world.rank == 0:
            logger.warning("spike: %s", "; ".join(report.spikes))
        return bool(report.findings or (report.spikes and self.settings.on_spike == "trip"))

    def record_healthy_step(self, report: StepReport) -> None:
        """A step was taken."""
        self.recovery_policy.healthy()
        self.spikes.healthy(report)
        self.healthy = self.newest if self.settings.on_spike == "trip" else ()

    def describe(self, step: int, stage: StagePlan, report: StepReport) -> str:
        """Which step was bad, and why."""
        what = "is not finite" if report.findings else "has spiked"
        findings = "; ".join(report.findings or report.spikes)
        return f"step {step} (stage {stage.index + 1}, {stage.name}) {what}: {findings}"
