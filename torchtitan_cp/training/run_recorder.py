"""Builds the records of a run from its steps, evaluations and stages, and hands them to the metrics logger."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.checkpoint.saved_run import TOKENIZER_FILE
from torchtitan_cp.config import to_toml
from torchtitan_cp.config.json_types import Json
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.run_folder import RUN_CONFIG, prepare_run_folder
from torchtitan_cp.curriculum import ResolvedStage, describe_rope
from torchtitan_cp.curriculum.gate import Verdict
from torchtitan_cp.data.batches.micro_batches import MicroBatch
from torchtitan_cp.data.corpus.statistics import statistics_table
from torchtitan_cp.data.corpus.store import replace_file
from torchtitan_cp.evaluation.result import EvaluationResult
from torchtitan_cp.health.monitor import StepReport
from torchtitan_cp.metrics import figures
from torchtitan_cp.metrics.expert_load import expert_fields, expert_loads
from torchtitan_cp.metrics.jsonl_sink import METRICS_FILE, EvaluationLine, read_evaluations
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.loss_breakdown import LossBreakdown
from torchtitan_cp.metrics.step_record import StepRecord
from torchtitan_cp.metrics.tensorboard_sink import TENSORBOARD_FOLDER
from torchtitan_cp.metrics.throughput import find_peak, imbalance, keys_sent, mean_keys
from torchtitan_cp.parallel.experts import Routing
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.evaluation_history import Curves, EvaluationHistory
from torchtitan_cp.training.model import ParallelModel

logger = logging.getLogger(__name__)
REACH_FILE = "keys_found.png"  # in the run's folder
SPEED_DECAY = 0.9  # per step, of the moving average of a stage's speed


class RunRecorder:
    """Records a run and changes nothing in it.

    Args:
        model: the model in training.
        data: the text it reads.
        metrics_logger: takes the records.

    Attributes:
        checkpoint_seconds: how long saves have blocked training since the last step; the trainer adds to it.
        message_seconds: of the last step, (waiting for context-parallel messages, messages in flight).
    """

    def __init__(self, model: ParallelModel, data: DataPipeline, metrics_logger: MetricsLogger) -> None:
        self.model, self.data, self.log = model, data, metrics_logger
        self.config, self.world = config, world = model.config, model.world
        device, self.folder = world.device, Path(config.job.dump_folder)
        self.peak = find_peak(device.device, device.name, model.compute_dtype, config.metrics.peak_tflops)
        self.peak_checked = world.rank != 0
        self.training_curves: Curves = {}
        self.history = EvaluationHistory()
        self.stage_rows: dict[int, dict[str, str | float | None]] = {}
        self.speeds: dict[int, float] = {}
        self.newest: StepRecord | None = None
        self.evaluation: EvaluationResult | None = None
        self.evaluated_at = 0
        self.checkpoint_seconds, self.message_seconds = 0.0, (0.0, 0.0)
        self.routing: Routing | None = None
        self.allocation_retries = 0

    def start(self, steps_done: int, *, evaluates_again: bool = False) -> None:
        """Write the run's folder, open the logs and print what will run.

        Args:
            steps_done: optimizer steps taken by earlier starts.
            evaluates_again: the evaluation of the last one is repeated, as it may not have been finished.

        Raises:
            ConfigError: the folder cannot be written.
        """
        config, device, log = self.config, self.world.device, self.log
        if self.world.rank == 0:
            text, tokenizer = to_toml(config), self.data.corpus.tokenizer
            prepare_run_folder(config.job.dump_folder)
            replace_file(self.folder / RUN_CONFIG, text.encode())
            if tokenizer.path and config.tokenizer.trained:
                replace_file(self.folder / TOKENIZER_FILE, tokenizer.path.read_bytes())
            log.open_files(self.folder, steps_done, evaluates_again=evaluates_again)
            for record in read_evaluations(self.folder):
                self.history.add(record)
            log.text("config", f"```toml\n{text}\n```", steps_done)
            for name, stream in self.data.streams.items():
                lengths = stream.store.document_lengths
                log.image(f"documents/{name}", steps_done, figures.draw_document_lengths, lengths, name)
        if config.job.description:
            log.say(config.job.description)
        model_name = config.model.flavor or Path(config.model.hub_checkpoint or config.model.config).stem
        log.say(
            f"{config.model.architecture} {model_name}: "
            f"{self.model.parameter_count:,} parameters{self._trained()} on "
            f"{self.world.size} x {device.name}, {device.backend}, compute in {config.training.compute_dtype}\n"
            f"peak {self.peak.flops_per_second / 1e12:.3g} TFLOP/s a rank: {self.peak.source}\n"
            f"{self.model.meshes.summary()}\n"
            f"{statistics_table({name: source.statistics for name, source in self.data.corpus.sources.items()})}"
        )
        log.console.bar.start()

    def _trained(self) -> str:
        """What [lora] trains of the parameters, and stores in NF4; empty without it."""
        if (counts := self.model.lora_counts) is None:
            return ""
        whole = f" and {counts.whole:,} of them" * bool(counts.whole)
        quantized = f"; in NF4: {counts.quantized:,}" * bool(counts.quantized)
        return f" (trained: {counts.adapters:,} more in adapters{whole}{quantized})"

    def start_stage(self, stage: ResolvedStage, progress: Progress, batch: MicroBatch, seconds: float) -> None:
        """Describe the stage, and draw which rank computes which tiles of a sequence if several ranks share it.

        Args:
            progress: before the stage's next step.
            batch: the stage's next micro-batch.
            seconds: how long it took to enter the stage.
        """
        exchange, first = "each sequence on one rank", progress.step - progress.stage_step
        if batch.plan.ranks > 1:
            strategy, layout = batch.plan.strategy, batch.plan.layout.name
            sent = keys_sent(batch.plans, [mixer.window for mixer in self.model.args.mixers if mixer.n_heads])
            exchange = (
                f"attention by {strategy} on layout {layout} (the busiest rank computes {imbalance(batch.plan):.2f} "
                f"times the mean, a rank sends {sent:.2f} times its keys)"
            )
            title = f"stage {stage.name}, step {progress.step:,}: {strategy}, {layout}"
            self.log.image(
                "curriculum/attention_tiles", progress.step, figures.draw_attention_owners, batch.plan, title
            )
        self.log.say(
            f"stage {stage.index + 1} of {len(self.config.curriculum.stages)}: {stage.name}, "
            f"sequences of {stage.seq_len:,} tokens, "
            f"{stage.global_batch_tokens:,} tokens a step, cp {stage.cp} x dp {stage.dp}, "
            f"{exchange}, rope {describe_rope(stage.rope)}, "
            f"steps {first + 1} to {first + stage.steps}; entered in {seconds:.1f} s{self.data.describe_stage(stage)}"
            f"{'; optimizer state reset' * stage.resets_optimizer}{self.model.pipeline_summary(stage)}",
            tag="stage",
            step=progress.step,
        )
        self.stage_losses = self._new_breakdown(stage)

    def start_step(self, stage: ResolvedStage, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepare for a step. Every metrics.interval-th one is recorded in more detail."""
        self.micro_batches, detailed = micro_batches, step % self.config.metrics.interval == 0
        self.step_losses = self._new_breakdown(stage) if detailed else None
        self.model.observe = self._add_losses if detailed else None

    def _new_breakdown(self, stage: ResolvedStage) -> LossBreakdown:
        return LossBreakdown(stage.seq_len, list(self.data.streams), self.model.device)

    def _add_losses(self, batch: MicroBatch, losses: Tensor) -> None:
        if self.step_losses and self.model.meshes.owns_loss:
            assert batch.document_positions is not None
            labels, document_positions = map(self.world.device.move, (batch.labels, batch.document_positions))
            positions = batch.plan.layout.positions(batch.plan.rank, self.model.device)
            self.step_losses.add(losses, labels != IGNORED, positions, document_positions, batch.sources)

    def record_step(
        self,
        stage: ResolvedStage,
        progress: Progress,
        report: StepReport,
        *,
        lr: float,
        waited: float,
        seconds: float,
        skipped: bool,
        total_steps: int,
        routing: Routing | None = None,
    ) -> None:
        """Record an optimizer step. Collective.

        Args:
            progress: after the step.
            waited: seconds until the batch arrived.
            seconds: duration of the whole step.
            total_steps: optimizer steps of the whole run.
            routing: how many of the step's tokens went to each expert.
        """
        self.model.observe = None
        speed = stage.global_batch_tokens / seconds
        parts = self.model.pop_timings() | {"checkpoint": self.checkpoint_seconds}
        pipeline, self.message_seconds = parts.pop("pipeline", 0.0), (parts["cp_wait"], parts.pop("cp_flight"))
        self.checkpoint_seconds = 0.0
        record = StepRecord(
            step=progress.step,
            stage=stage.name,
            stage_index=stage.index,
            seq_len=stage.seq_len,
            cp=stage.cp,
            tokens=progress.trained_tokens,
            loss=None if skipped else report.loss,
            grad_norm=None if skipped else report.grad_norm,
            lr=lr,
            tokens_per_second=speed,
            tokens_per_second_per_rank=speed / self.world.size,
            mfu=self._mfu(speed, self.model.flops_per_token(stage.seq_len)),
            peak_memory_bytes=report.peak_memory_bytes,
            data_wait_seconds=waited,
            step_seconds=seconds,
            seconds=parts,
            pipeline_idle=1 - (parts["forward"] + parts["backward"]) / pipeline if pipeline else None,
            skipped=skipped,
            spikes=len(report.spikes),
            skipped_steps=progress.health["all_skips"],
            rollbacks=progress.health["rollbacks"],
            **({} if skipped else self._details(stage, report, speed, routing)),
        )
        self.newest, self.routing = record, None if skipped else routing
        self.speeds[stage.index] = SPEED_DECAY * self.speeds.get(stage.index, speed) + (1 - SPEED_DECAY) * speed
        self.log.step(record, total_steps)

    def _details(
        self, stage: ResolvedStage, report: StepReport, speed: float, routing: Routing | None
    ) -> dict[str, Any]:
        """Fields that only a healthy step's record has; most of them only every metrics.interval steps. Collective."""
        details = {
            "learned_tokens": report.learned_tokens,
            "largest_logit": report.largest_logit if math.isfinite(report.largest_logit) else None,
            "block_grad_norm": {str(block): norm for block, norm in enumerate(report.block_grad_norms)},
            "block_output": {str(block): value for block, value in enumerate(report.block_outputs)},
        }
        if self.step_losses is None:
            return details
        dist.all_reduce(self.step_losses.sums)
        self.stage_losses.sums += self.step_losses.sums
        windows = [mixer.window for mixer in self.model.args.mixers]
        keys = {window: fmean(mean_keys(batch.plans[window]) for batch in self.micro_batches) for window in windows}
        flops = self.model.flops_per_token(stage.seq_len, [keys[window] for window in windows])
        memory = self.model.memory_by_kind()
        other = max(0, self.world.device.peak_memory_bytes() - sum(memory.values()))
        self._warn_of_full_memory()
        return {
            **details,
            **self.step_losses.means(),
            "mfu_mask": self._mfu(speed, flops),
            "cp_imbalance": max(imbalance(batch.plan) for batch in self.micro_batches),
            "cp_keys_sent": max(keys_sent(batch.plans, windows) for batch in self.micro_batches),
            "unlabelled": 1 - report.learned_tokens / stage.global_batch_tokens,
            "memory_bytes": memory | {"other": other},
            **(expert_fields(*routing, stage.global_batch_tokens) if routing else {}),
        }

    def _warn_of_full_memory(self) -> None:
        before, self.allocation_retries = self.allocation_retries, self.world.device.allocation_retries()
        if self.allocation_retries > before:
            logger.warning(
                f"the GPU's memory was full: torch emptied its cache {self.allocation_retries - before} more times, "
                "and each slows a step; docs/troubleshooting.md says what saves memory"
            )

    def _mfu(self, speed: float, flops: float) -> float:
        mfu = speed * flops / (self.peak.flops_per_second * self.world.size)
        self.peak_checked = self.peak_checked or self.peak.warn_if_exceeded(mfu)
        return mfu

    def record_evaluation(
        self, stage: ResolvedStage, step: int, result: EvaluationResult, *, at_end: bool = True
    ) -> None:
        """Record the result of an evaluation, and what changed since that at step 0.

        Args:
            at_end: of the stage; within one, fewer lines are printed.
        """
        self.evaluation, self.evaluated_at, log = result, step, self.log
        start = self.history.baseline if step else None
        log.say("\n".join(result.lines(step, stage.seq_len, start, brief=not at_end)))
        record: dict[str, Json] = {"step": step, "stage": stage.name, "seq_len": stage.seq_len, **result.to_json()}
        record["since_start"] = dict(result.since(start, stage.seq_len)) if start else None
        stage_lengths = [each.seq_len for each in self.config.curriculum.stages]
        numbers = result.scalars(stage.seq_len, stage_lengths)
        log.evaluation(record, {f"validation/{name}": value for name, value in numbers.items()}, step)
        history, name = self.history, self.history.add(cast(EvaluationLine, record))
        at = f"stage {stage.name}, step {step:,}"
        self._draw_routing(step, at)
        title = f"loss on held-out text, {at}"
        log.image("validation/loss_by_position", step, figures.draw_loss_by_position, history.curves, title=title)
        for variant, retrieval in result.retrieval.items():
            if retrieval.by_length():
                tag, draw = f"validation/{variant}/{name}", figures.draw_retrieval_map
                title = f"% of {variant.replace('_', ' ')} right, {at}"
                log.image(tag, step, draw, *retrieval, trained_length=stage.seq_len, title=title)
        if history.reach:
            title = f"% of planted keys found, {at}"
            log.image("validation/keys_found", step, figures.draw_reach, *history.reach_map(), title=title)

    def _draw_routing(self, step: int, at: str) -> None:
        """Draw the experts' load in the last step, unless it is drawn already."""
        if self.routing:
            counts = self.routing.counts
            title = f"load of experts, {at}"
            self.log.image("experts/load", step, lambda: figures.draw_expert_loads(expert_loads(counts), title=title))
        self.routing = None

    def record_gate(self, stage: ResolvedStage, progress: Progress, verdict: Verdict) -> None:
        """Record how far the stage's gate is from opening, and whether the stage goes on."""
        outcome = "goes on"
        if verdict.opened:
            outcome = f"ends after {progress.stage_step} of {stage.steps} steps"
        elif progress.stage_step >= stage.steps:
            outcome = "ends at max_tokens, and its gate did not open"
        self.log.say(f"stage {stage.index + 1} {outcome}: {verdict.why}", tag="gate", step=progress.step)
        bounds = {f"{name}_wanted": bound for name, bound in stage.until.items()}
        values = {**verdict.measured, **bounds, "of_max_tokens": progress.stage_step / stage.steps}
        self.log.scalars({f"gate/{name}": value for name, value in values.items()}, progress.step)

    def end_stage(self, stage: ResolvedStage, progress: Progress) -> None:
        """Print the table of the stages so far, and draw their losses by position."""
        at = f"stage {stage.name}, step {progress.step:,}"
        self._draw_routing(progress.step, at)
        first, last, steps = progress.stage_losses[str(stage.index)]
        curve = {int(start): loss for start, loss in self.stage_losses.means()["loss_by_position"].items()}
        if curve:
            self.training_curves[stage.name] = (list(curve), list(curve.values()))
            curves, draw, title = self.training_curves, figures.draw_loss_by_position, f"training loss, {at}"
            self.log.image("train/loss_by_position", progress.step, draw, curves, title=title)
        result = self.evaluation if self.evaluated_at == progress.step else None
        if result:
            bins = zip(result.position_starts, result.position_losses, strict=True)
            curve = {start: loss for start, loss in bins if start < stage.seq_len and not math.isnan(loss)}
        self.stage_rows[stage.index] = {
            "stage": stage.name,
            "seq_len": stage.seq_len,
            "cp": stage.cp,
            "steps": int(steps),
            "first": first,
            "last": last,
            "far": curve[max(curve)] if curve else None,
            "passkey": result.passkey_accuracy if result else None,
            "tok/s": self.speeds.get(stage.index),
            "mfu": self.newest.mfu if self.newest else None,
            "GiB": self.newest.peak_memory_bytes / 2**30 if self.newest else None,
        }
        self.log.console.print_stages(self.stage_rows.values())
        self.log.say(self.data.describe_epochs(progress.text_step))

    def finish(self) -> None:
        """Print how far back keys are found, the last validation loss, and where the run's files are."""
        folder, lines = self.folder, []
        self.log.console.close()
        if said := self.history.describe_reach():
            self.log.console.print_reach(*self.history.reach_map())
            lines.append(said)
        if last := self.evaluation:
            start = self.history.baseline
            before = f", {start.loss:.4f} at step 0" if start and start.loss is not None else ""
            lines.append(
                f"validation loss {last.loss:.4f} on held-out text{before}; a unigram model has {last.unigram:.4f}"
            )
        if self.config.checkpoint.enable:
            lines.append(f"checkpoints: {folder / 'checkpoints'}")
        lines.append(f"every step:  {folder / METRICS_FILE}")
        if said and self._write_reach():
            lines.append(f"keys found:  {folder / REACH_FILE}")
        if self.config.metrics.tensorboard:
            board = folder / TENSORBOARD_FOLDER
            lines.append(f"look at it:  tensorboard --logdir {board}, then http://localhost:6006/#custom_scalars")
        self.log.say("\n".join(lines))

    def _write_reach(self) -> bool:
        """Write the map as a picture; False if that fails. Only rank 0 has the run's folder."""
        if self.world.rank:
            return False
        try:
            title = "% of planted keys found after each stage"
            pixels = figures.draw_reach(*self.history.reach_map(), title=title)
            replace_file(self.folder / REACH_FILE, figures.to_png(pixels))
        except OSError as error:
            logger.error("%s cannot be written: %s", self.folder / REACH_FILE, error.strerror)
            return False
        return True
