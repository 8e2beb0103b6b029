"""The forward and backward of a step: run, checked on every rank, and run again to diagnose it if it was bad."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.data.batches.micro_batches import MicroBatch
from torchtitan_cp.health.diagnosis import Diagnoser, Diagnosis
from torchtitan_cp.health.monitor import HealthMonitor, StepReport
from torchtitan_cp.health.recovery import RecoveryState
from torchtitan_cp.health.replay import RunSettings, save_bundle
from torchtitan_cp.parallel.experts import Routing
from torchtitan_cp.runtime.device import seed_step
from torchtitan_cp.training import registry
from torchtitan_cp.training.model import ParallelModel, StepSums

MAX_BUNDLES = 3  # of a run; each holds the input of a module for whole sequences


class StepRunner:
    """Runs steps up to their gradients and checks those. Making and calling it is collective.

    Args:
        stop_and_save_requests: (whether this rank asks to stop after the step, whether it asks to save).

    Attributes:
        monitor: detects bad steps.
        routing: how many tokens each expert got in the last step; None without experts.
        healthy_batches: micro-batches of the stage's last healthy step, to compare a spike with.
    """

    def __init__(self, model: ParallelModel, stop_and_save_requests: Callable[[], tuple[bool, bool]]) -> None:
        config, args, health = model.config, model.args, model.config.health
        self.config, self.model, self.stop_and_save_requests = config, model, stop_and_save_requests
        self.monitor = HealthMonitor(health, model.parts, args.n_layers, model.device)
        self.diagnoser = Diagnoser(
            list(zip(model.layers.of_rank(model.meshes.pp.get_local_rank()), model.parts, strict=True)),
            model.token_loss,
            args.vocab_size,
            model.meshes.tp,
            model.device,
            self._repeat,
            compiled=model.compiled,
        )
        self.routing: Routing | None = None
        self.healthy_batches: tuple[MicroBatch, ...] = ()
        self.seed_key = 0, 0  # (stage, its step): seeds the random numbers of the last step

    def start_stage(self, spike_history: list[list[float]]) -> None:
        """Forget the last steps.

        Args:
            spike_history: numbers of healthy steps to find spikes with; see health.monitor.SpikeDetector.
        """
        self.monitor.spikes.recent, self.healthy_batches = spike_history, ()

    def compute_gradients(self, progress: Progress, micro_batches: tuple[MicroBatch, ...]) -> StepReport:
        """Forward and backward of the step that follows `progress`, and its report over all ranks."""
        self.seed_key = progress.stage, progress.stage_step
        self._seed()
        return self._check(self.model.forward_backward(micro_batches))

    def _seed(self) -> None:
        seed_step(self.config.training.seed, *self.seed_key, self.model.coordinate)

    def _check(self, sums: StepSums) -> StepReport:
        # Also taken after bad steps and their repetitions, so that a later step does not count it.
        self.routing = self.model.routing.take() if self.model.args.n_experts else None
        memory = self.model.world.device.peak_memory_bytes()
        return self.monitor.check_step(sums, self.model.square_norms(), memory, self.stop_and_save_requests())

    def _repeat(self, micro_batches: Sequence[MicroBatch], within: AbstractContextManager[None]) -> StepReport:
        """Run a step again, uncompiled and with the same random numbers, and free its gradients.

        Args:
            within: a context that watches the modules.
        """
        self._seed()
        try:
            with self.model.uncompiled(), within:
                sums = self.model.forward_backward(tuple(micro_batches))
            return self._check(sums)
        finally:
            self.model.zero_grad()

    def diagnose(
        self, step: int, report: StepReport, micro_batches: Sequence[MicroBatch], state: RecoveryState
    ) -> Diagnosis:
        """Run a bad step again, find the module where it went wrong first, and save a bundle for `replay`.

        Args:
            state: counts the bundles.
        """
        diagnosis = self.diagnoser.diagnose(micro_batches, report, self.healthy_batches)
        if state.replays >= MAX_BUNDLES or not (report.findings or self.healthy_batches):
            return diagnosis
        state.replays += 1
        config, args = self.config, self.model.args
        about: RunSettings = {
            "findings": report.findings or report.spikes,
            "architecture": config.model.architecture,
            "sizes": registry.sizes_of(args),
            "lora": dataclasses.asdict(config.lora) if config.lora else None,
            "compute_dtype": config.training.compute_dtype,
            "loss_chunk_tokens": self.model.token_loss.chunk_tokens,
            "z_loss": config.training.z_loss,
            "logit_scale": args.logit_scale,
            "logit_softcap": args.logit_softcap,
        }
        folder = Path(config.job.dump_folder) / "health" / f"step-{step}"
        return save_bundle(self.diagnoser, diagnosis, step, micro_batches, about, folder)
