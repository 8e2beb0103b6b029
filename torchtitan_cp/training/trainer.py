"""The training loop. It follows the path of a batch; the other packages do the work."""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.progress import Progress, check_identity
from torchtitan_cp.config import Config, UserError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.run_folder import CHECKPOINTS
from torchtitan_cp.curriculum import ResolvedStage, judge
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch, batch_signature
from torchtitan_cp.data.corpus.random_tokens import random_corpus
from torchtitan_cp.evaluation.held_out import is_due
from torchtitan_cp.evaluation.result import EvaluationResult
from torchtitan_cp.health.diagnosis import find_nonfinite_weight
from torchtitan_cp.health.monitor import StepReport
from torchtitan_cp.health.recovery import NonFiniteError, RecoveryPolicy
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.metrics.profiling import StepProfiler
from torchtitan_cp.optim.schedule import LearningRates
from torchtitan_cp.parallel.apply import reshard
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.runtime.consistency import check_agreement
from torchtitan_cp.runtime.device import World, freeze_long_lived_objects, use_deterministic_kernels
from torchtitan_cp.runtime.signals import StopSignals, any_rank
from torchtitan_cp.runtime.watchdog import current_activity, set_activity
from torchtitan_cp.training import resume
from torchtitan_cp.training.data_pipeline import DataPipeline, prepare_corpus
from torchtitan_cp.training.evaluator import Evaluator
from torchtitan_cp.training.export import start_exports
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.preflight import check_before_corpus, fit_vocabulary
from torchtitan_cp.training.resolve import resolve_run
from torchtitan_cp.training.run_recorder import RunRecorder
from torchtitan_cp.training.step import StepRunner

logger = logging.getLogger(__name__)


class Trainer:
    """One run of a config on the ranks of this job.

    Args:
        config: as read from the TOML; it is resolved for the number of ranks, or refused.
        world: this process among the ranks.
        model_args: sizes of the model; None: those that the config gives.
        stage_index: the stage whose tp and pp this process takes; None: the stage where training begins or resumes.
        trains: `run` will be called; comparisons and evaluations call only parts of this class.
        random_tokens: the text is random, and the corpus neither read nor looked for.

    Attributes:
        progress: where the run stands.
        stopping: a rank was asked to stop, so training ends after the current step.
        save_requested: a checkpoint is due after the current step.
        announced_stage, evaluated_stage: index of the last stage that this process announced or evaluated; -1: none.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model_args: ModelArgs | None = None,
        stage_index: int | None = None,
        *,
        trains: bool = True,
        random_tokens: bool = False,
    ) -> None:
        run = resolve_run(config, world.size, model_args, device=world.device.device.type)
        if run.uncompiled:
            logger.info("nothing is compiled: %s", run.uncompiled)
        self.config = config = run.config
        self.world, self.device, self.stages = world, world.device, run.stages
        self.folder = Path(config.job.dump_folder)
        self.checkpoints = CheckpointManager(self.folder / CHECKPOINTS, config.checkpoint)
        self.saved = self.checkpoints.find_newest() if config.checkpoint.enable else None
        first = resume.find_first_stage(self.saved, self.stages) if stage_index is None else self.stages[stage_index]
        if config.training.deterministic:
            use_deterministic_kernels()
        args = check_before_corpus(run, self.device.device.type, trains=trains, download=True)
        if trains and self.saved:
            path, saved_progress = self.saved
            check_identity(saved_progress.identity, resume.identity_of(config, args, first.tp), path)

        self.signals = StopSignals(self._announce_stop)
        if random_tokens:
            corpus = random_corpus(config.data, args.vocab_size, config.training.seed)
        else:
            # No time limit: rank 0 may tokenize for hours while the others wait.
            set_activity("preparing the corpus", 0, math.inf)
            with self.signals:
                corpus = prepare_corpus(config, self._stop_requested)
            args = fit_vocabulary(run, corpus.tokenizer.vocab_size)
        self.watchdog_timeout_seconds = config.job.startup_timeout_seconds
        set_activity("building the model", 0, self.watchdog_timeout_seconds)
        self.data_pipeline = DataPipeline(config, corpus, run.longest)

        self.meshes = Meshes(self.device.device.type, first.degrees)
        self.model = ParallelModel(dataclasses.replace(run, model_args=args), world, self.meshes, first)
        self.step_runner = StepRunner(self.model, self._stop_and_save_requests)
        self.evaluator = Evaluator(
            self.model, self.data_pipeline, self.stages, self._set_activity, self._stop_requested
        )
        rates = [(stage.lr, stage.steps) for stage in self.stages]
        self.learning_rates = LearningRates(config.optimizer, config.lr_scheduler, rates)
        self.profiler = StepProfiler(self.folder, config.profiling, world.rank, self.device.device)
        self.checkpoints.restart_interval()
        self.stopping = self.save_requested = False
        self.announced_stage = self.evaluated_stage = -1
        self.progress = resume.start_progress(config, args, corpus, block_tokens=run.longest, tp=first.tp)

    # Where the run stands ----------------------------------------------------------------------------------

    @property
    def stage(self) -> ResolvedStage:
        """The current stage."""
        return self.stages[self.progress.stage]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run. A gate that opens early makes it smaller."""
        return resume.count_steps(self.progress, self.stages)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage is self.stages[-1] and self._is_evaluated()

    def _is_trained(self) -> bool:
        return resume.is_stage_trained(self.progress, self.stages)

    def _is_evaluated(self) -> bool:
        return resume.is_stage_evaluated(self.progress, self.stages)

    @property
    def needs_relaunch(self) -> bool:
        """Whether the current stage has another tp or pp than this process, so that new processes must train it."""
        return (self.stage.tp, self.stage.pp) != (self.meshes.degrees.tp, self.meshes.degrees.pp)

    def _set_progress(self, **changes: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **changes)

    def _set_activity(self, activity: str, *, step: int | None = None) -> None:
        """Tell the watchdog what this rank does now, and for which step (by default the last one taken)."""
        set_activity(activity, self.progress.step if step is None else step, self.watchdog_timeout_seconds)

    # The run -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train the rest of the curriculum. If nothing is left to train, say so and return."""
        self._set_activity("looking for a checkpoint to resume from", step=0)
        self.resume()
        steps_done, on_rank_0 = self.progress.step, self.world.rank == 0
        self.metrics_logger = MetricsLogger(self.config.metrics, self.total_steps, steps_done, enabled=on_rank_0)
        export_dtype = self.config.checkpoint.export if on_rank_0 else "no"
        finish_exports = start_exports(self.folder, export_dtype, self.data_pipeline.corpus.tokenizer)
        if self.finished:
            self.metrics_logger.say(
                f"{self.folder} is finished: all {self.total_steps} steps are trained. Nothing to do."
            )
            finish_exports(True)
            return
        if self.config.checkpoint.enable:
            self._set_activity("connecting to the other ranks over gloo, for saves")
            self.checkpoints.connect()
        self.recovery_policy = RecoveryPolicy(self.config.health, self.progress.health)
        self.step_runner.start_stage(self.progress.spike_history)
        self.recorder = RunRecorder(self.model, self.data_pipeline, self.metrics_logger)
        # Before the first step there is an evaluation too.
        evaluates_again = steps_done == 0 or (self._is_trained() and not self._is_evaluated())
        self.recorder.start(steps_done, evaluates_again=evaluates_again)
        self.evaluator.show_progress = self.metrics_logger.console.evaluation_progress
        try:
            with self.signals:
                self._train()
                finish_exports(not (self.stopping or self.needs_relaunch))
            if self.needs_relaunch and not self.stopping:
                self.metrics_logger.say(
                    f"stage {self.stage.index + 1} has tp {self.stage.tp} and pp {self.stage.pp}: the job restarts "
                    "from its checkpoint (run_train.sh does; otherwise run the same command again)"
                )
            elif not self.stopping:
                self.recorder.finish()
        finally:
            self.metrics_logger.close()

    def resume(self) -> None:
        """Load the newest checkpoint, or the weights to start from. Collective."""
        self.progress = resume.resume(self.saved, self.progress, self.stages, self.model, self.checkpoints)
        self.evaluator.time.budget.trained_seconds = self.progress.trained_seconds
        self.evaluator.time.budget.evaluation_seconds = self.progress.evaluation_seconds
        if not self.finished:
            self.data_pipeline.check_epochs(self.stages, self.progress)

    def _train(self) -> None:
        """Train stage by stage until the end, a stop or a halt, then save the state."""
        [self.stopping] = any_rank(self._stop_requested(), device=self.device.device)  # before the first step
        try:
            while not (self.finished or self.stopping):
                if self._is_evaluated():
                    self._leave_stage()
                if self.needs_relaunch:
                    break
                self._run_stage(self.stage)
        except NonFiniteError:
            with suppress(UserError):  # it is in the log, and the reason for the halt matters more
                self._save_the_last()
            raise
        self._save_the_last()

    # A stage -----------------------------------------------------------------------------------------------

    def _run_stage(self, stage: ResolvedStage) -> None:
        """Take the remaining steps of a stage with its own process groups, frequencies and loader, then evaluate.

        Returns early after a bad step, since the loader has to start again behind the skipped text. The last step is
        saved before the evaluation at the stage's end. If that was interrupted, no step remains and only it is done.
        """
        begun = time.perf_counter()
        # The first step may compile.
        self.watchdog_timeout_seconds = self.config.job.startup_timeout_seconds
        self._set_activity(f"entering stage {stage.index + 1}", step=self.progress.step + 1)
        batch_layout = self.enter_stage(stage)
        steps_left = 0 if self._is_trained() else stage.steps - self.progress.stage_step
        ropes = self.progress.ropes | {str(stage.index): stage.rope_settings}
        # A finished stage that the config has lengthened since then has steps left, and will read more tokens.
        read_tokens = {} if steps_left else self.progress.read_tokens
        self._set_progress(text_settings=stage.text_settings, ropes=ropes, read_tokens=read_tokens)
        if stage.resets_optimizer and self.progress.stage_step == 0:
            self.model.reset_optimizers()
        # Without steps left the last step's batch is read again, since a batch is needed to announce the stage.
        first_step = self.progress.text_step if steps_left else self.progress.text_step - 1
        pin = self.device.device.type == "cuda"
        batches = self.data_pipeline.steps(first_step, max(1, steps_left), batch_layout, pin=pin)
        first_batches = next(batches)
        check_agreement(f"stage {stage.index + 1}", batch_signature(batch_layout, first_batches))
        if self.announced_stage != stage.index:
            self.announced_stage = stage.index
            self.recorder.start_stage(stage, self.progress, first_batches[0], time.perf_counter() - begun)
        if self.config.evaluation.at_start and self.progress.step == 0 and self.evaluated_stage < 0:
            self._evaluate_at_start(stage, batch_layout)
            if self.stopping:
                return
        batches = itertools.chain([first_batches], batches)
        freeze_long_lived_objects()
        for _ in range(steps_left):
            with self.profiler.trace(self.progress.step + 1, lambda: self.recorder.message_seconds):
                healthy = self._step(stage, batches)
            self.watchdog_timeout_seconds = self.config.job.timeout_seconds
            if not healthy:
                self._save_if_due(False)
                return
            progress, interval = self.progress, self.config.evaluation.interval
            due = is_due(interval, progress.step, progress.stage_step, stage.steps)
            if due and not (self._is_trained() or self.stopping):
                self._evaluate(stage, batch_layout)
            if self._is_trained():
                break
            self._save_if_due(False)
            if self.stopping:
                return
        if steps_left:
            self._set_progress(read_tokens=self._read_tokens())
            self._save_if_due(True)
        if not (self._is_evaluated() or self.stopping):
            self._set_activity("evaluating with the others")
            self.metrics_logger.say(f"stage {stage.index + 1} is trained; evaluating after step {self.progress.step}")
            self._evaluate(stage, batch_layout)
            if self._is_evaluated() and steps_left:
                self._count_seconds()
                self.checkpoints.save_evaluation(self.progress)
            else:
                self._save_if_due(self._is_evaluated())
        if self._is_evaluated():
            self.recorder.end_stage(stage, self.progress)

    def _leave_stage(self) -> None:
        """Move to the next stage. Its text begins where this stage stopped, even if the config was changed since."""
        progress, read_tokens = self.progress, self.progress.read_tokens
        if not read_tokens:  # the checkpoint was written before this field existed
            self.data_pipeline.start_stage(self.stage, progress)
            read_tokens = self._read_tokens()
        self._set_progress(
            stage=progress.stage + 1, stage_step=0, stage_done=False, source_tokens=read_tokens, read_tokens={}
        )
        self.step_runner.start_stage([])  # losses and norms of another length are not comparable
        self.device.release_memory()  # the next stage's process groups need some

    def _read_tokens(self) -> dict[str, int]:
        """Tokens of each source that have been read up to the current step."""
        return self.progress.source_tokens | self.data_pipeline.samples.tokens_after(self.progress.text_step)

    def enter_stage(self, stage: ResolvedStage) -> BatchLayout:
        """Make the groups, frequencies and samples that a stage needs. Collective.

        Returns:
            which sequences of its steps this rank reads.

        Raises:
            ConfigError: the ranks would not run the same stage.
        """
        position = {"step": self.progress.step, "text_step": self.progress.text_step}
        # The fields of `data` are compared one by one.
        check_agreement(f"stage {stage.index + 1}", vars(stage) | vars(stage.data) | position | {"data": ""})
        self.data_pipeline.start_stage(stage, self.progress)
        return self.model.configure_stage(stage)

    # A step ------------------------------------------------------------------------------------------------

    def _step(self, stage: ResolvedStage, batches: Iterator[tuple[MicroBatch, ...]]) -> bool:
        """One optimizer step: read, forward and backward, check, update, record. Returns whether it was healthy."""
        begun, number = time.perf_counter(), self.progress.step + 1
        self._set_activity("waiting for its batch", step=number)
        micro_batches = next(batches)
        waited = time.perf_counter() - begun

        self._set_activity("in forward, backward and update with the others", step=number)
        lr = self.learning_rates.at(stage.index, self.progress.stage_step, self.progress.taken_steps)
        self.recorder.start_step(stage, number, micro_batches)
        report = self.forward_backward(micro_batches)
        self.stopping, self.save_requested = report.stop, report.save
        healthy = not self.step_runner.monitor.is_bad(report, number)
        if healthy:
            self._update(stage, report, lr)
            self.step_runner.healthy_batches = micro_batches if self.config.health.on_spike == "handle" else ()
        else:
            self._recover(stage, report, micro_batches)
        health = dataclasses.asdict(self.recovery_policy.state)
        self._set_progress(health=health, spike_history=self.step_runner.monitor.spikes.recent)
        seconds = time.perf_counter() - begun
        self.evaluator.time.budget.trained_seconds += seconds
        self.recorder.record_step(
            stage,
            self.progress,
            report,
            lr=lr,
            waited=waited,
            seconds=seconds,
            skipped=not healthy,
            total_steps=self.total_steps,
            routing=self.step_runner.routing,
        )
        return healthy

    def forward_backward(self, micro_batches: tuple[MicroBatch, ...]) -> StepReport:
        """Forward and backward of the next step, and its report over all ranks. Collective."""
        return self.step_runner.compute_gradients(self.progress, micro_batches)

    def _update(self, stage: ResolvedStage, report: StepReport, lr: float) -> None:
        """Run the optimizers, and count the step."""
        self.model.update(lr, report.grad_norm, self.step_runner.routing)
        self.recovery_policy.record_healthy_step()
        self.step_runner.monitor.spikes.record_healthy_step(report)
        progress, name = self.progress, str(stage.index)
        first_loss = progress.stage_losses.get(name, [report.loss])[0]
        self._set_progress(
            step=progress.step + 1,
            stage_step=progress.stage_step + 1,
            trained_tokens=progress.trained_tokens + stage.global_batch_tokens,
            stage_losses={**progress.stage_losses, name: [first_loss, report.loss, float(progress.stage_step + 1)]},
        )

    # A bad step --------------------------------------------------------------------------------------------

    def _recover(self, stage: ResolvedStage, report: StepReport, micro_batches: tuple[MicroBatch, ...]) -> None:
        """Skip the text of a bad step, or go back to a checkpoint; no weight has changed. Collective.

        Raises:
            NonFiniteError: the run has to halt.
        """
        self.model.zero_grad()
        step, policy, job = self.progress.step + 1, self.recovery_policy, self.config.job
        problem, weights_finite = f"step {step} (stage {stage.index + 1}, {stage.name}) {report.summary}", True
        # This takes uncompiled steps, may wait for a pending save, and may load a checkpoint.
        limit = max(job.timeout_seconds, job.startup_timeout_seconds, self.config.checkpoint.timeout_seconds)
        if self.config.health.replay:
            set_activity("running a bad step again with the others", step, limit)
            diagnosis = self.step_runner.diagnose(step, report, micro_batches, policy.state)
            problem += f". {diagnosis.summary[0].upper()}{diagnosis.summary[1:]}"
            weights_finite = diagnosis.weights_finite

        def find_good_checkpoint(before: int | None) -> tuple[Path, Progress] | None:
            if not self.config.checkpoint.enable:
                return None
            set_activity("looking for a checkpoint to go back to", self.progress.step, limit)
            self.checkpoints.wait()
            return self.checkpoints.find_newest(before, healthy=True)

        message, checkpoint = policy.choose_action(problem, find_good_checkpoint, weights_finite=weights_finite)
        if checkpoint is None:
            self.progress = self.progress.after_skip()
        else:
            path, saved = checkpoint
            self.checkpoints.load(path, self.model.parts, self.model.optimizers)
            self.progress = self.progress.after_rollback(saved)
            self.step_runner.start_stage(saved.spike_history)
            self.save_requested = True  # so that a resumed run skips the same text
        self.metrics_logger.warn(message, self.progress.step)

    # Between steps -----------------------------------------------------------------------------------------

    def _evaluate_at_start(self, stage: ResolvedStage, batch_layout: BatchLayout) -> None:
        """Evaluate before the first step, if there is time, for later evaluations to be compared with. Collective."""
        self.evaluator.time.budget.planned_tokens = sum(each.steps * each.global_batch_tokens for each in self.stages)
        without_gate = dataclasses.replace(stage, until={})  # which would take what time it needs
        if result := self._measure(without_gate, batch_layout):
            self._record_evaluation(stage, result)

    def _evaluate(self, stage: ResolvedStage, batch_layout: BatchLayout) -> None:
        """Evaluate on held-out text, and end the stage if its gate opens. Collective."""
        result = self._measure(stage, batch_layout)
        if result:
            self._record_evaluation(stage, result)
            if stage.index == 0:
                self._set_progress(short_loss=result.loss, short_tokens=self.config.evaluation.tokens)
            if stage.until:
                verdict = judge(stage.until, {**result.scalars(stage.seq_len), "validation_loss": result.loss})
                self._set_progress(stage_done=verdict.opened)
                self.recorder.record_gate(stage, self.progress, verdict)
        if self._is_trained() and (result or not self.stopping):
            self._set_progress(evaluated_step=self.progress.step)

    def _record_evaluation(self, stage: ResolvedStage, result: EvaluationResult) -> None:
        """Record an evaluation. Drawing its figures is part of its time."""
        begun, step = time.perf_counter(), self.progress.step
        at_end = step == 0 or self._is_trained() or bool(stage.until)  # a gate may end the stage with any evaluation
        self.recorder.record_evaluation(stage, step, result, at_end=at_end)
        self.evaluator.time.budget.evaluation_seconds += time.perf_counter() - begun

    def _measure(self, stage: ResolvedStage, batch_layout: BatchLayout) -> EvaluationResult | None:
        """Evaluate on held-out text; None if nothing could be measured. Collective."""
        job = self.config.job
        if self.evaluated_stage != stage.index:  # a stage's first evaluation may compile, as its first step may
            self.watchdog_timeout_seconds = max(job.timeout_seconds, job.startup_timeout_seconds)
        result = self.evaluator.evaluate(stage, batch_layout, self.progress, at_end=self._is_trained())
        self.watchdog_timeout_seconds = job.timeout_seconds
        reshard(self.model.parts)  # no backward has freed the weights that FSDP gathered
        self.model.pop_timings()  # so that the next step does not count them
        requests = self._stop_and_save_requests()  # the evaluation may have taken long
        self.stopping, self.save_requested = any_rank(*requests, device=self.device.device)
        if result:
            self.evaluated_stage = stage.index
        return result

    def _announce_stop(self) -> None:
        """Log on rank 0, when it gets a stop signal, after which step the run ends."""
        now = current_activity()
        logger.info("asked to stop: the run ends%s (now %s)", f" after step {now.step}" * (now.step > 0), now.activity)

    def _stop_requested(self) -> bool:
        """Whether a signal asked this rank to stop."""
        return self.signals.received is not None

    def _stop_and_save_requests(self) -> tuple[bool, bool]:
        """Whether this rank asks to stop (a signal came) and to save (checkpoint.interval_minutes are over)."""
        return self._stop_requested(), self.checkpoints.time_is_up()

    def _save_if_due(self, stage_end: bool) -> None:
        """Begin a checkpoint if one is due. Collective."""
        self.checkpoints.poll()
        settings = self.config.checkpoint
        due = self.save_requested or self.progress.step % settings.interval == 0 or stage_end
        if settings.enable and due:
            begun = time.perf_counter()
            self._save(stage_end)
            self.recorder.checkpoint_seconds += time.perf_counter() - begun

    def _save(self, stage_end: bool) -> None:
        """Start a checkpoint, unless a weight is not finite. Collective."""
        # Waits for the pending save first.
        set_activity("saving", self.progress.step, self.config.checkpoint.timeout_seconds)
        self.checkpoints.restart_interval()
        self.checkpoints.wait()
        nonfinite = find_nonfinite_weight(self.model.parts) is not None
        nonfinite, lost_contact = any_rank(nonfinite, self.checkpoints.lost_contact, device=self.device.device)
        if lost_contact:
            self.checkpoints.close()  # the next save makes a new process group
        if nonfinite:  # a later start would resume from it, and retention might delete a good checkpoint for it
            if self.world.rank == 0:
                logger.error("NO CHECKPOINT of step %d: a weight is not finite", self.progress.step)
            return
        self._count_seconds()
        self.checkpoints.save(self.progress, self.model.parts, self.model.optimizers, stage_end=stage_end)

    def _count_seconds(self) -> None:
        """Note in the progress how long the run has trained and evaluated."""
        budget = self.evaluator.time.budget
        self._set_progress(trained_seconds=budget.trained_seconds, evaluation_seconds=budget.evaluation_seconds)

    def _save_the_last(self) -> None:
        """Save the state at the end of a run or before a stop, and wait until it is on disk.

        Raises:
            UserError: it cannot be written.
        """
        if self.stopping and not self.progress.step:
            return self.metrics_logger.say("stopped by a signal before the first step; there is nothing to save")
        if self.config.checkpoint.enable:
            set_activity("waiting for the last checkpoint", self.progress.step, self.config.checkpoint.timeout_seconds)
            self.checkpoints.wait()
            # All ranks decide together: one may have lost contact at the end of a save that succeeded on the others.
            if any_rank(self.checkpoints.newest_step != self.progress.step, device=self.device.device)[0]:
                self._save(self._is_trained())
            self.checkpoints.close()  # waits for the save
            if self.checkpoints.newest_step != self.progress.step:
                raise UserError(
                    f"the last checkpoint, of step {self.progress.step}, could not be written to "
                    f"{self.checkpoints.folder}; the log above says why",
                    fix="fix that, and run the same command again: it resumes from the last good checkpoint",
                )
        if self.stopping:
            saved = "saved" if self.config.checkpoint.enable else "not saved, as checkpoint.enable = false"
            self.metrics_logger.say(
                f"stopped by a signal after step {self.progress.step} of {self.total_steps}; the state is {saved}. "
                "Run the same command again to resume."
            )
