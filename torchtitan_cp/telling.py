"""What a run tells: a record of every step, what a person reads on the console, and the summary at the end."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_cp.checkpoint import Progress
from torchtitan_cp.config import Config, to_toml
from torchtitan_cp.config.check import check_dump_folder
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.data import statistics_table
from torchtitan_cp.health import StepReport
from torchtitan_cp.measuring import Evaluated, describe, numbers_of
from torchtitan_cp.metrics import Console, MetricsWriter, StepRecord, find_peak, flops_per_token
from torchtitan_cp.metrics.console import StageSummary
from torchtitan_cp.metrics.pictures import loss_against_position, passkey_map
from torchtitan_cp.network import Network
from torchtitan_cp.parallel import World
from torchtitan_cp.reading import Reading

logger = logging.getLogger(__name__)

SPEED_DECAY = 0.9  # a step: how long the speed shown of a stage remembers


class Telling:
    """Tells of a run. It speaks and writes on rank 0, and changes nothing.

    Args:
        config: of the run.
        world: this process among the ranks.
        network: that is trained.
        total_steps: optimizer steps of the whole run, as far as is known; done: those taken before.
    """

    def __init__(self, config: Config, world: World, network: Network, total_steps: int, done: int) -> None:
        self.config, self.world, self.network, self.done = config, world, network, done
        self.folder, self.leads = Path(config.job.dump_folder), world.rank == 0
        self.console = Console(total_steps, done, speaks=self.leads)
        self.speeds: dict[int, float] = {}
        self.writer: MetricsWriter | None = None
        self.evaluation: Evaluated | None = None
        self.curves: dict[str, tuple[list[int], list[float]]] = {}

    def begin(self, reading: Reading) -> None:
        """Open the logs, and say what will run."""
        config, device = self.config, self.world.device
        self.peak = find_peak(device.device, device.name, self.network.compute_dtype, config.metrics.peak_tflops)
        if self.leads:
            check_dump_folder(config.job.dump_folder)
            (self.folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
            settings = config.metrics
            self.writer = MetricsWriter(
                self.folder, after_step=self.done, tensorboard=settings.tensorboard, interval=settings.interval
            )
            self.writer.text("config", f"```toml\n{to_toml(config)}\n```", self.done)
            for name, stream in reading.streams.items():
                self.writer.lengths(name, stream.store.document_lengths)
        statistics = {name: source.statistics for name, source in reading.corpus.sources.items()}
        self.say(
            f"{config.model.architecture} {config.model.flavor}: {self.network.parameter_count:,} parameters on "
            f"{self.world.size} x {device.name}, {device.backend}, compute in {config.training.compute_dtype}\n"
            f"peak {self.peak.flops_per_second / 1e12:.3g} TFLOP/s a rank: {self.peak.source}\n"
            f"{self.network.meshes.describe()}\n"
            f"{statistics_table(statistics)}"
        )
        self.console.start()

    def end(self) -> None:
        """Take the bar away and close the logs."""
        self.console.stop()
        if self.writer:
            self.writer.close()

    def say(self, text: str, *, tag: str = "", step: int = 0) -> None:
        """Print it, and with a tag write it to TensorBoard too."""
        self.console.say(text)
        if tag and self.writer:
            self.writer.text(tag, text, step)

    def warn(self, text: str, step: int) -> None:
        """Log what was done about a bad step, and write it to TensorBoard."""
        if self.leads:
            logger.warning(text)
        if self.writer:
            self.writer.text("health", text, step)

    def step(
        self,
        stage: StagePlan,
        progress: Progress,
        report: StepReport,
        *,
        lr: float,
        waited: float,
        seconds: float,
        skipped: bool,
        total_steps: int,
    ) -> None:
        """Record an optimizer step.

        Args:
            progress: after the step.
            waited: seconds until its batch was there; seconds: of the whole step.
            total_steps: of the run, as far as is known now.
        """
        speed, shape = stage.global_batch_tokens / seconds, self.network.shape
        flops = flops_per_token(
            shape.linear_parameters(), shape.layer_windows, shape.n_heads, shape.head_dim, stage.seq_len
        )
        record = StepRecord(
            step=progress.step,
            stage=stage.name,
            stage_index=stage.index,
            seq_len=stage.seq_len,
            cp=stage.cp,
            tokens=progress.cursor,
            loss=None if skipped else report.loss,
            grad_norm=None if skipped else report.grad_norm,
            lr=lr,
            tokens_per_second=speed,
            tokens_per_second_per_rank=speed / self.world.size,
            mfu=speed * flops / (self.peak.flops_per_second * self.world.size),
            peak_memory_bytes=report.peak_memory_bytes,
            data_wait_seconds=waited,
            step_seconds=seconds,
            pipeline_idle=self.network.pipeline.idle_share() if self.network.pipeline else None,
            skipped=skipped,
            spikes=len(report.spikes),
            skipped_steps=progress.health["all_skips"],
            rollbacks=progress.health["rollbacks"],
            lr_cuts=progress.health["lr_cuts"],
        )
        self.speeds[stage.index] = SPEED_DECAY * self.speeds.get(stage.index, speed) + (1 - SPEED_DECAY) * speed
        if self.writer:
            self.writer.step(record)
        self.console.step(record, total_steps)

    def evaluated(self, stage: StagePlan, step: int, found: Evaluated) -> None:
        """Tell of a look at held-out text."""
        self.evaluation = found
        self.say("\n".join(describe(stage, step, found)))
        if not self.writer:
            return
        self.writer.evaluation({"step": step, "stage": stage.name, "seq_len": stage.seq_len, **numbers_of(found)})
        scalars = {"loss": found.loss, "unigram_loss": found.unigram, "context_gain": found.context_gain}
        scalars["short_loss_rise"] = found.short_loss_rise
        if len(found.by_source) > 1:
            scalars |= {f"loss_by_source/{name}": loss for name, loss in found.by_source.items()}
        scalars |= {f"{name}_accuracy": each.at(stage.seq_len) for name, each in found.retrieval.items()}
        for name, value in scalars.items():
            if value is not None:
                self.writer.scalar(f"validation/{name}", value, step)
        self.curves[stage.name] = (found.position_starts, found.position_losses)
        if not self.config.metrics.tensorboard:
            return
        self.writer.image("validation/loss_by_position", loss_against_position(self.curves), step)
        for name, each in found.retrieval.items():
            picture = passkey_map(each.accuracy, each.lengths, each.depths, trained_length=stage.seq_len, title=name)
            self.writer.image(f"validation/{name}", picture, step)

    def finish(self, stages: Sequence[StagePlan], stage_losses: Mapping[str, Sequence[float]]) -> None:
        """Print the table of all stages, and what to look at next.

        Args:
            stage_losses: by the stage's number, its first and last loss and its steps.
        """
        rows = []
        for stage in stages:
            first, last, steps = stage_losses.get(str(stage.index), (None, None, 0))
            speed = self.speeds.get(stage.index)
            rows.append(StageSummary(stage.name, stage.seq_len, stage.cp, int(steps or 0), first, last, speed))
        lines = []
        if self.evaluation:
            loss, unigram = self.evaluation.loss, self.evaluation.unigram
            lines.append(f"validation loss {loss:.4f} on held-out text; a unigram model has {unigram:.4f}")
        if self.config.checkpoint.enable:
            lines.append(f"checkpoints: {self.folder / 'checkpoints'}")
        lines.append(f"every step:  {self.folder / 'metrics.jsonl'}")
        if self.config.metrics.tensorboard:
            lines.append(f"look at it:  tensorboard --logdir {self.folder / 'tensorboard'}")
        self.console.finish(rows, "\n".join(lines))
