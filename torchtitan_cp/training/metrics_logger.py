"""What a run tells: a record of every step, what a person reads on the console, and the summary at the end."""

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_cp.attention import Plan, choose_strategy
from torchtitan_cp.checkpoint import Progress
from torchtitan_cp.checkpoint.weights import TOKENIZER_FILE
from torchtitan_cp.config import Config, to_toml
from torchtitan_cp.config.check import check_dump_folder
from torchtitan_cp.curriculum import StagePlan
from torchtitan_cp.curriculum.gate import Verdict
from torchtitan_cp.data import statistics_table
from torchtitan_cp.data.batches.loader import MicroBatch
from torchtitan_cp.data.corpus.tokenizer import trains_tokenizer
from torchtitan_cp.evaluation.evaluated import Evaluated, describe, numbers_of
from torchtitan_cp.health import StepReport
from torchtitan_cp.metrics import Console, MetricsWriter, StepRecord, find_peak, flops_per_token
from torchtitan_cp.metrics.console import StageSummary
from torchtitan_cp.metrics.loss_breakdown import LossBreakdown
from torchtitan_cp.metrics.pictures import length_histogram, loss_against_position, passkey_map, tile_map
from torchtitan_cp.optim import IGNORED
from torchtitan_cp.runtime import World
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)

SPEED_DECAY = 0.9  # a step: how long the speed shown of a stage remembers


class MetricsLogger:
    """Tells of a run. It speaks and writes on rank 0, and changes nothing.

    Args:
        config: of the run.
        world: this process among the ranks.
        network: that is trained.
        total_steps: optimizer steps of the whole run, as far as is known; done: those taken before.
    """

    def __init__(self, config: Config, world: World, model: ParallelModel, total_steps: int, done: int) -> None:
        self.config, self.world, self.model, self.done = config, world, model, done
        self.folder, self.leads = Path(config.job.dump_folder), world.rank == 0
        self.console = Console(total_steps, done, speaks=self.leads)
        self.speeds: dict[int, float] = {}
        self.writer: MetricsWriter | None = None
        self.evaluation: Evaluated | None = None
        self.evaluated_at = 0
        # Losses by position: of training, and of evaluations.
        self.curves: dict[str, tuple[list[int], list[float]]] = {}
        self.evaluated_curves: dict[str, tuple[list[int], list[float]]] = {}
        self.summaries: dict[int, StageSummary] = {}
        self.newest: StepRecord | None = None
        self.memory: dict[str, int] = {}
        self.stall_seconds = self.flight_seconds = 0.0

    def begin(self, data_pipeline: DataPipeline) -> None:
        """Open the logs, and say what will run."""
        self.data_pipeline, config, device = data_pipeline, self.config, self.world.device
        self.peak = find_peak(device.device, device.name, self.model.compute_dtype, config.metrics.peak_tflops)
        if self.leads:
            check_dump_folder(config.job.dump_folder)
            (self.folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
            tokenizer = data_pipeline.corpus.tokenizer.path
            if tokenizer and trains_tokenizer(config.tokenizer):
                shutil.copyfile(tokenizer, self.folder / TOKENIZER_FILE)
            settings = config.metrics
            self.writer = MetricsWriter(
                self.folder,
                after_step=self.done,
                tensorboard=settings.tensorboard,
                interval=settings.interval,
                wandb=settings.wandb,
            )
            for found in self.writer.earlier_evaluations():
                losses = [math.nan if loss is None else loss for loss in found["position_losses"]]
                self.evaluated_curves[found["stage"]] = (found["position_starts"], losses)
            self.writer.text("config", f"```toml\n{to_toml(config)}\n```", self.done)
            for name, stream in data_pipeline.streams.items() if self.writer.boards else ():
                self.writer.image(f"documents/{name}", length_histogram(stream.store.document_lengths, name), self.done)
        statistics = {name: source.statistics for name, source in data_pipeline.corpus.sources.items()}
        if config.job.description:
            self.say(config.job.description)
        self.say(
            f"{config.model.architecture} {config.model.flavor or Path(config.model.hub_checkpoint).name}: "
            f"{self.model.parameter_count:,} parameters on "
            f"{self.world.size} x {device.name}, {device.backend}, compute in {config.training.compute_dtype}\n"
            f"peak {self.peak.flops_per_second / 1e12:.3g} TFLOP/s a rank: {self.peak.source}\n"
            f"{self.model.meshes.describe()}\n"
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

    def enter(self, stage: StagePlan, step: int, batch: MicroBatch) -> None:
        """A stage begins, with this micro-batch."""
        self.stage_sums: Tensor | None = None
        plan, tp = batch.plan, self.model.meshes.degrees.tp
        heads = (self.model.args.n_heads // tp, self.model.args.n_kv_heads // tp)
        strategy = choose_strategy(*heads, plan.ranks, plan.mask.band) if plan.strategy == "auto" else plan.strategy
        self.tile_map(batch, f"{stage.name}: {strategy}, {plan.layout.name}", step)

    def tile_map(self, batch: MicroBatch, title: str, step: int) -> None:
        """Draw who computes what of a micro-batch's attention, if several ranks share it."""
        if self.writer and self.writer.boards and batch.plan.ranks > 1:
            self.writer.image("curriculum/attention_tiles", tile_map(batch.plan, title), step)

    def before(self, stage: StagePlan, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """A step begins. Every metrics.interval-th one is looked at more closely."""
        self.micro_batches, self.loss_breakdown = micro_batches, None
        if step % self.config.metrics.interval == 0:
            self.loss_breakdown = LossBreakdown(stage.seq_len, list(self.data_pipeline.streams), self.model.device)
        self.model.observe = self._count if self.loss_breakdown else None

    def _count(self, batch: MicroBatch, losses: Tensor) -> None:
        if self.loss_breakdown and self.model.meshes.owns_loss:
            move = self.world.device.move
            assert batch.document_positions is not None
            labels, within = move(batch.labels), move(batch.document_positions)
            positions = move(batch.plan.positions)
            self.loss_breakdown.add(losses, labels != IGNORED, positions, within, batch.sources)

    def stalled(self, seconds: float) -> None:
        """A checkpoint held the run up."""
        self.stall_seconds += seconds

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
        """Record an optimizer step. Collective.

        Args:
            progress: after the step.
            waited: seconds until its batch was there; seconds: of the whole step.
            total_steps: of the run, as far as is known now.
        """
        self.model.observe = None
        speed = stage.global_batch_tokens / seconds
        parts = self.model.pop_timings() | {"checkpoint": self.stall_seconds}
        self.stall_seconds, whole, self.flight_seconds = 0.0, parts.pop("pipeline", 0.0), parts.pop("cp_flight")
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
            mfu=self._utilisation(speed, self._flops(stage)),
            peak_memory_bytes=report.peak_memory_bytes,
            data_wait_seconds=waited,
            step_seconds=seconds,
            seconds=parts,
            pipeline_idle=1 - (parts["forward"] + parts["backward"]) / whole if whole else None,
            skipped=skipped,
            spikes=len(report.spikes),
            skipped_steps=progress.health["all_skips"],
            rollbacks=progress.health["rollbacks"],
            lr_cuts=progress.health["lr_cuts"],
        )
        if not skipped:
            record = replace(record, **self._details(stage, report, speed))
        self.newest = record
        self.speeds[stage.index] = SPEED_DECAY * self.speeds.get(stage.index, speed) + (1 - SPEED_DECAY) * speed
        if self.writer:
            self.writer.step(record)
        self.console.step(record, total_steps)

    def _details(self, stage: StagePlan, report: StepReport, speed: float) -> dict[str, Any]:
        """What a healthy step is looked at more closely for, as fields of its record. Collective."""
        details: dict[str, Any] = {
            "largest_logit": report.largest_logit if math.isfinite(report.largest_logit) else None,
            "block_grad_norm": {str(block): norm for block, norm in enumerate(report.block_grad_norms)},
            "block_output": {str(block): value for block, value in enumerate(report.block_outputs)},
        }
        if self.loss_breakdown is None:
            return details
        dist.all_reduce(self.loss_breakdown.sums)
        self.stage_sums = (
            self.loss_breakdown.sums if self.stage_sums is None else self.stage_sums + self.loss_breakdown.sums
        )
        found, memory = self.loss_breakdown.details(), self._memory()
        return details | {
            "loss_by_position": found.by_position,
            "loss_by_document_position": found.by_document_position,
            "loss_by_source": found.by_source,
            "mfu_mask": self._utilisation(speed, self._flops(stage, self.micro_batches)),
            "cp_imbalance": max(imbalance(batch.plan) for batch in self.micro_batches),
            "unlabelled": 1 - found.tokens / stage.global_batch_tokens,
            "memory_bytes": memory | {"other": max(0, self.world.device.peak_memory_bytes() - sum(memory.values()))},
        }

    def messages(self) -> tuple[float, float]:
        """Seconds of the newest step for which context-parallel messages were waited for, and were in flight."""
        return (self.newest.seconds["cp_wait"] if self.newest else 0.0), self.flight_seconds

    def _memory(self) -> dict[str, int]:
        """Of weights, gradients and optimizer; they stay as they are once the optimizer has its state."""
        if not self.memory.get("optimizer"):
            self.memory = self.model.memory_by_kind()
        return self.memory

    def _flops(self, stage: StagePlan, micro_batches: Sequence[MicroBatch] = ()) -> float:
        """FLOPs of training on a token; with micro-batches, with only the attention that their masks allow."""
        shape, keys = self.model.args, None
        if micro_batches:
            windows = {
                window: [keys_seen(batch.plans[window]) for batch in micro_batches] for window in {*shape.windows, 0}
            }
            keys = [fmean(windows[window]) for window in shape.layer_windows]
        return flops_per_token(
            shape.linear_parameters(), shape.layer_windows, shape.n_heads, shape.head_dim, stage.seq_len, keys
        )

    def _utilisation(self, speed: float, flops: float) -> float:
        return speed * flops / (self.peak.flops_per_second * self.world.size)

    def stage_over(self, stage: StagePlan, step: int, stage_losses: Mapping[str, Sequence[float]]) -> None:
        """Print the table of the stages so far, and draw their losses by position.

        Args:
            step: of the run, the stage's last.
            stage_losses: by the stage's number, its first and last loss and its steps.
        """
        first, last, steps = stage_losses.get(str(stage.index), (None, None, 0))
        placed: list[float] = []
        if self.stage_sums is not None:
            loss_breakdown = LossBreakdown(stage.seq_len, list(self.data_pipeline.streams), self.model.device)
            loss_breakdown.sums = self.stage_sums
            found = loss_breakdown.details().by_position
            self.curves[stage.name] = ([int(start) for start in found], list(found.values()))
            placed = list(found.values())
        evaluated = self.evaluation if self.evaluation and self.evaluated_at == step else None
        if evaluated:
            within = zip(evaluated.position_starts, evaluated.position_losses, strict=True)
            placed = [loss for start, loss in within if start < stage.seq_len and not math.isnan(loss)]
        self.summaries[stage.index] = StageSummary(
            stage.name,
            stage.seq_len,
            stage.cp,
            int(steps or 0),
            first,
            last,
            placed[-1] if placed else None,
            evaluated.passkey_accuracy if evaluated else None,
            self.speeds.get(stage.index),
            self.newest.mfu if self.newest else None,
            self.newest.peak_memory_bytes if self.newest else None,
        )
        self.console.table(list(self.summaries.values()))
        if self.writer and self.writer.boards and self.curves:
            self.writer.image("train/loss_by_position", loss_against_position(self.curves), step)

    def evaluated(self, stage: StagePlan, step: int, found: Evaluated) -> None:
        """Tell of a look at held-out text."""
        self.evaluation, self.evaluated_at = found, step
        self.say("\n".join(describe(step, stage.seq_len, found)))
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
        self.evaluated_curves[stage.name] = (found.position_starts, found.position_losses)
        if not self.writer.boards:
            return
        self.writer.image("validation/loss_by_position", loss_against_position(self.evaluated_curves), step)
        for name, each in found.retrieval.items():
            picture = passkey_map(each.accuracy, each.lengths, each.depths, trained_length=stage.seq_len, title=name)
            self.writer.image(f"validation/{name}/{stage.name}", picture, step)

    def judged(self, stage: StagePlan, progress: Progress, verdict: Verdict, said: str) -> None:
        """Tell how far the stage's gate is from opening. `said`: what follows from the verdict."""
        self.say(f"{said}: {verdict.why}", tag="gate", step=progress.step)
        if self.writer:
            bounds = {f"{name}_wanted": bound for name, bound in stage.until.items()}
            scalars = {**verdict.measured, **bounds, "of_max_tokens": progress.stage_step / stage.steps}
            for name, value in scalars.items():
                self.writer.scalar(f"gate/{name}", value, progress.step)

    def finish(self) -> None:
        """Say what to look at next."""
        lines = []
        if self.evaluation:
            loss, unigram = self.evaluation.loss, self.evaluation.unigram
            lines.append(f"validation loss {loss:.4f} on held-out text; a unigram model has {unigram:.4f}")
        if self.config.checkpoint.enable:
            lines.append(f"checkpoints: {self.folder / 'checkpoints'}")
        lines.append(f"every step:  {self.folder / 'metrics.jsonl'}")
        if self.config.metrics.tensorboard:
            lines.append(f"look at it:  tensorboard --logdir {self.folder / 'tensorboard'}")
        self.console.stop()
        self.say("\n".join(lines))


def keys_seen(plan: Plan) -> float:
    """Keys that a query of the plan's sequences sees, on average."""
    return sum(plan.areas) / plan.sequence_length / len(plan.mask.document_lengths or ((),))


def imbalance(plan: Plan) -> float:
    """Work of the busiest rank of the ring over the mean."""
    return max(plan.areas) / fmean(plan.areas)
