"""The training loop. It reads top to bottom like the way of a batch; the rooms do the work."""

import dataclasses
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_cp.checkpoint import CheckpointManager, Progress, SaveSchedule, check_identity
from torchtitan_cp.checkpoint.hub import start_from_hub
from torchtitan_cp.config import Config, ConfigError, UserError
from torchtitan_cp.curriculum import StagePlan, describe_rope
from torchtitan_cp.data import prepare
from torchtitan_cp.data.batches.loader import BatchLayout, MicroBatch
from torchtitan_cp.health import NonFiniteError, StepReport
from torchtitan_cp.metrics import MetricsLogger
from torchtitan_cp.metrics.profiling import StepProfiler
from torchtitan_cp.optim import LearningRates
from torchtitan_cp.parallel import Meshes
from torchtitan_cp.runtime import StopSignals, World, any_rank, seed_step, use_deterministic_kernels
from torchtitan_cp.runtime.watchdog import set_activity
from torchtitan_cp.training import registry
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.evaluator import Evaluator
from torchtitan_cp.training.export import exported_stages
from torchtitan_cp.training.health_monitor import HealthMonitor
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.resolve import resolve_run
from torchtitan_cp.training.run_recorder import RunRecorder

logger = logging.getLogger(__name__)


class Trainer:
    """One run of a config on the ranks of this job.

    Args:
        config: as read; checked here against the number of ranks.
        world: this process among them.

    Attributes:
        progress: where the run stands.
    """

    def __init__(self, config: Config, world: World) -> None:
        run = resolve_run(config, world.size)
        config = run.config
        self.config, self.world, self.device = config, world, world.device
        self.folder = Path(config.job.dump_folder)
        self.stages = run.stages
        self.checkpoints = CheckpointManager(self.folder / "checkpoints", config.checkpoint)
        begins = self._first_stage()
        if config.training.deterministic:
            use_deterministic_kernels()

        # However long that takes: a killed pass goes on from where it was, but one of these ranks waits for another.
        set_activity("preparing the corpus", 0, math.inf)
        corpus = prepare(config.data, config.tokenizer)
        set_activity("building the model", 0, config.job.startup_timeout_seconds)
        self._check_same_corpus(corpus.fingerprint)
        lengths = [stage.seq_len for stage in self.stages]
        self.data_pipeline = DataPipeline(config, corpus, max(lengths))
        self.data_pipeline.check_gates(self.stages)

        args = registry.with_vocabulary(run.model_args, corpus.tokenizer.vocab_size)
        self.meshes = Meshes(self.device.device.type, run.degrees[begins.index])
        self.model = ParallelModel(config, world, self.meshes, args, begins, max(lengths))
        self.save_schedule, self.signals = SaveSchedule(config.checkpoint), StopSignals()
        self.stopping = self.time_is_up = False
        self.health_monitor = HealthMonitor(config, world, self.model, self._stop_and_save_requests)
        self.evaluator = Evaluator(
            self.model, self.data_pipeline, config.evaluation, self.stages[0], self._set_activity, self._asked
        )
        self.learning_rates = LearningRates(
            config.optimizer, config.lr_scheduler, [(stage.lr, stage.steps) for stage in self.stages]
        )
        self.announced, self.must_save = -1, False
        self.profiler = StepProfiler(self.folder, config.profiling, world.rank, self.device.device)
        # As it comes back from a checkpoint, where a tuple is a list.
        sizes = json.loads(json.dumps(dataclasses.asdict(args)))
        identity = {"model": sizes, "data": corpus.fingerprint, "seed": config.training.seed}
        identity["optimizer"] = f"{config.optimizer.name}, state in {config.optimizer.state}"
        self.progress = Progress(identity=identity, block_tokens=max(lengths))
        self.patience_seconds = config.job.startup_timeout_seconds

    def _check_same_corpus(self, fingerprint: str) -> None:
        """Refuse ranks that read other tokens, as nodes with folders of their own may. Collective."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, fingerprint)
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        if others:
            raise ConfigError(
                f"rank {', '.join(map(str, others))} has other tokens than rank 0: corpora {sorted(set(found))}",
                fix="give every node the same files under data.path, and delete data.cache_folder where it is older",
            )

    def _first_stage(self) -> StagePlan:
        """The stage that training begins with or goes on in: its tp and pp are those of this process's life."""
        self.saved = self.checkpoints.find_newest() if self.config.checkpoint.enable else None
        if self.saved is None:
            return self.stages[0]
        path, self.progress = self.saved
        last = len(self.stages) - 1
        if self.progress.stage > last:
            raise ConfigError(
                f"{path} was written in stage {self.progress.stage + 1}, and the config has {last + 1}",
                fix="put the stages back, or give the new run a folder of its own: --job.dump_folder=...",
            )
        return self.stages[min(self.progress.stage + self._stage_over(), last)]

    # Where the run stands ----------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run: those taken, and those left of this stage and after it."""
        stage, progress = self.stages[self.progress.stage], self.progress
        left = 0 if progress.stage_done else stage.steps - progress.stage_step
        return progress.step + max(0, left) + sum(later.steps for later in self.stages[stage.index + 1 :])

    @property
    def finished(self) -> bool:
        """Whether the last stage is trained."""
        return self.progress.stage == len(self.stages) - 1 and self._stage_over()

    def _stage_over(self) -> bool:
        return self.progress.stage_done or self.progress.stage_step >= self.stages[self.progress.stage].steps

    @property
    def relaunches(self) -> bool:
        """Whether the stage at hand wants another tp or pp than this process began with: a new one has to go on."""
        stage, mesh = self.stages[self.progress.stage], self.meshes.degrees
        return (stage.tp, stage.pp) != (mesh.tp, mesh.pp)

    def _relaunching(self) -> str:
        stage = self.stages[self.progress.stage]
        return (
            f"stage {stage.index + 1} wants tp {stage.tp} and pp {stage.pp}: the job starts anew from its checkpoint "
            "(run_train.sh does; otherwise run the same command again)"
        )

    def _set_activity(self, what: str, *, step: int | None = None) -> None:
        """Tell the watchdog what this rank begins, for a step (by default the last one taken)."""
        set_activity(what, self.progress.step if step is None else step, self.patience_seconds)

    # The run -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train what is left of the curriculum; a finished run says so."""
        self._set_activity("looking for a checkpoint to go on from", step=0)
        self._resume()
        done = self.progress.step
        self.metrics_logger = MetricsLogger(self.config.metrics, self.total_steps, done, enabled=self.world.rank == 0)
        if self.finished:
            with self._exports():
                self.metrics_logger.say(
                    f"{self.folder} is finished: all {self.total_steps} steps are trained. Nothing to do."
                )
            return
        self.health_monitor.load_state(self.progress)
        self.recorder = RunRecorder(self.config, self.world, self.model, self.data_pipeline, self.metrics_logger)
        self.recorder.start(done)
        try:
            with self.signals, self._exports() as hurried:
                self._train()
                if self.stopping:
                    hurried.set()
            if self.relaunches and not self.stopping:
                self.metrics_logger.say(self._relaunching())
            elif not self.stopping:
                self.recorder.finish()
        finally:
            self.metrics_logger.close()

    def _exports(self) -> AbstractContextManager[threading.Event]:
        """What writes the ends of stages for transformers beside training, if that is asked for."""
        dtype = self.config.checkpoint.export
        if self.world.rank or dtype == "no":
            return nullcontext(threading.Event())
        return exported_stages(self.folder, dtype, self.data_pipeline.corpus.tokenizer)

    def _train(self) -> None:
        """Stage by stage to the end, a stop or a halt, and the state then on disk."""
        try:
            while not (self.finished or self.stopping):
                if self._stage_over():
                    self._leave_stage()
                if self.relaunches:
                    break
                self._run_stage(self.stages[self.progress.stage])
        except NonFiniteError:
            with suppress(UserError):  # The log has it already, and why the run halts matters more.
                self._save_the_last()
            raise
        self._save_the_last()

    def _resume(self) -> None:
        if self.saved is None:
            self._start_from_hub()
            return
        path, saved = self.saved
        check_identity(saved.identity, self.progress.identity, path)
        if saved.block_tokens != self.progress.block_tokens:
            logger.warning(
                "the longest stage is now %d tokens and was %d: the data order changes from here, and some text may "
                "come twice",
                self.progress.block_tokens,
                saved.block_tokens,
            )
        self.checkpoints.load(path, self.model.parts, self.model.optimizers)
        self.progress = dataclasses.replace(
            saved, block_tokens=self.progress.block_tokens, identity=self.progress.identity
        )
        logger.info("resumed from %s: %d of %d steps are done", path, saved.step, self.total_steps)
        stage, now = self.stages[saved.stage], self.stages[saved.stage].text_recipe
        changed = [f"{name} {was} -> {now.get(name)}" for name, was in saved.recipe.items() if now.get(name) != was]
        if changed and saved.stage_step and not self._stage_over():
            logger.warning(
                "stage %d reads its text in another way from here, and may skip some or read it twice: %s",
                stage.index + 1,
                ", ".join(changed),
            )

    def _start_from_hub(self) -> None:
        """Take the weights of model.hub_checkpoint, if the config names one."""
        model, rope = self.config.model, self.stages[0].rope
        if model.hub_checkpoint:
            start_from_hub(Path(model.hub_checkpoint), self.model.parts, registry.hub_of(model).names, rope)

    # A stage -----------------------------------------------------------------------------------------------

    def _run_stage(self, stage: StagePlan) -> None:
        """Take the stage's steps that are left: new groups, frequencies and loader; the weights stay.

        After a bad step it returns, as another text is to be read.
        """
        begun = time.perf_counter()
        # Its first step may compile.
        self.patience_seconds = self.config.job.startup_timeout_seconds
        self._set_activity(f"entering stage {stage.index + 1}", step=self.progress.step + 1)
        batch_layout = self.enter_stage(stage)
        self.progress = dataclasses.replace(self.progress, recipe=stage.text_recipe)
        if stage.resets_optimizer and self.progress.stage_step == 0:
            self.model.reset_optimizers()
        left = stage.steps - self.progress.stage_step
        at = self.progress.stage_step + self.progress.passed(stage.index)
        batches = self.data_pipeline.steps(at, left, batch_layout, pin=self.device.device.type == "cuda")
        first = next(batches)
        if self.announced != stage.index:
            self._announce(stage, batch_layout, time.perf_counter() - begun)
            self.recorder.start_stage(stage, self.progress.step, first[0], self.model.exchange_of(batch_layout))
        batches = itertools.chain([first], batches)
        for _ in range(left):
            with self.profiler.trace(self.progress.step + 1, self.recorder.message_seconds):
                healthy = self._step(stage, batches)
            self.patience_seconds = self.config.job.timeout_seconds
            interval = self.config.evaluation.interval
            if not healthy:
                self._save_if_due(False)
                return
            if self._stage_over() or (interval and self.progress.step % interval == 0 and not self.stopping):
                if self.stopping:  # who asks for it may not wait so long
                    self.must_save = True
                    self._save_if_due(False)
                self._validate(stage, batch_layout)
                self.model.pop_timings()  # what it waited is not the next step's
                # It may have taken long.
                self.stopping, self.time_is_up = any_rank(*self._stop_and_save_requests(), device=self.device.device)
            self._save_if_due(self._stage_over())
            if self._stage_over():
                self.recorder.end_stage(stage, self.progress)
                self.metrics_logger.say(
                    self.data_pipeline.describe_epochs(self.progress.stage_step + self.progress.passed(stage.index))
                )
            if self._stage_over() or self.stopping:
                return

    def _leave_stage(self) -> None:
        """Go on to the next stage, which reads on where this one stopped."""
        stage, passed = self.progress.stage, self.progress.passed(self.progress.stage)
        samples = self.data_pipeline.stage_samples(self.stages[stage], self.progress.source_tokens, passed)
        self.progress = dataclasses.replace(
            self.progress,
            stage=stage + 1,
            stage_step=0,
            stage_done=False,
            source_tokens=self.progress.source_tokens | samples.tokens_after(self.progress.stage_step + passed),
        )
        self.health_monitor.forget_recent()

    def enter_stage(self, stage: StagePlan) -> BatchLayout:
        """Make what the stage needs: groups, frequencies, samples. Collective.

        Returns:
            how its steps are dealt out.
        """
        self.data_pipeline.start_stage(stage, self.progress.source_tokens, self.progress.passed(stage.index))
        return self.model.enter(stage)

    def _announce(self, stage: StagePlan, batch_layout: BatchLayout, seconds: float) -> None:
        self.announced = stage.index
        first = self.progress.step - self.progress.stage_step
        about = (
            f"stage {stage.index + 1} of {len(self.stages)}: {stage.name}, sequences of {stage.seq_len:,} tokens, "
            f"{stage.global_batch_tokens:,} tokens a step, cp {stage.cp} x dp {stage.dp}, "
            f"attention by {self.model.exchange_of(batch_layout)}, rope {describe_rope(stage.rope)}, "
            f"steps {first + 1} to {first + stage.steps}; entered in {seconds:.1f} s"
        )
        about += self.data_pipeline.describe_stage(stage) + "; optimizer state reset" * stage.resets_optimizer
        self.metrics_logger.say(about + self.model.describe_pipeline(stage), tag="stage", step=self.progress.step)

    # A step ------------------------------------------------------------------------------------------------

    def _step(self, stage: StagePlan, batches: Iterator[tuple[MicroBatch, ...]]) -> bool:
        """One optimizer step: read, run forward and backward, look, update, tell. Returns whether it was healthy."""
        begun = time.perf_counter()
        self._set_activity("waiting for its batch", step=self.progress.step + 1)
        micro_batches = next(batches)
        waited = time.perf_counter() - begun

        self._set_activity("in forward, backward and update with the others", step=self.progress.step + 1)
        reseed = partial(seed_step, self.config.training.seed, stage.index, self.progress.stage_step, self.model.role)
        reseed()
        lr = (
            self.learning_rates.at(stage.index, self.progress.stage_step)
            * self.health_monitor.recovery_policy.lr_factor
        )
        self.recorder.start_step(stage, self.progress.step + 1, micro_batches)
        report = self.gradients(micro_batches)
        self.stopping, self.time_is_up = report.stop, report.save
        healthy = not self.health_monitor.is_bad(report)
        if healthy:
            self._update(stage, report, lr)
        else:
            self._recover(stage, report, micro_batches, reseed)
        seconds = time.perf_counter() - begun
        self.evaluator.budget.trained_seconds += seconds
        self.recorder.record_step(
            stage,
            self.progress,
            report,
            lr=lr,
            waited=waited,
            seconds=seconds,
            skipped=not healthy,
            total_steps=self.total_steps,
        )
        return healthy

    def gradients(self, micro_batches: tuple[MicroBatch, ...]) -> StepReport:
        """Forward and backward of a step, and what every rank has to know of it. Collective."""
        return self.health_monitor.gradients(self.progress.step + 1, micro_batches)

    def _update(self, stage: StagePlan, report: StepReport, lr: float) -> None:
        """Let the optimizers run, and stand a step further."""
        self.model.update(lr, report.grad_norm)
        self.health_monitor.record_healthy_step(report)
        progress, name = self.progress, str(stage.index)
        first = progress.stage_losses.get(name, [report.loss])[0]
        row = [first, report.loss, float(progress.stage_step + 1)]
        self.progress = dataclasses.replace(
            self.health_monitor.with_health_state(progress),
            step=progress.step + 1,
            stage_step=progress.stage_step + 1,
            cursor=progress.cursor + stage.global_batch_tokens,
            stage_losses={**progress.stage_losses, name: row},
        )

    def _recover(
        self,
        stage: StagePlan,
        report: StepReport,
        micro_batches: tuple[MicroBatch, ...],
        reseed: Callable[[], None],
    ) -> None:
        """Leave everything as before the step but the text, which is passed over; or climb the ladder. Collective.

        Raises:
            NonFiniteError: the run is to halt.
        """
        self.model.zero_grad()
        recovery_policy, settings = self.health_monitor.recovery_policy, self.config.health
        what, recoverable = self.health_monitor.describe(self.progress.step + 1, stage, report), True
        if settings.replay:
            set_activity("running a bad step again with the others", self.progress.step + 1, self._recovery_seconds)
            found = self.health_monitor.diagnose(self.progress.step + 1, micro_batches, report, reseed)
            what, recoverable = f"{what}. {found.said[0].upper()}{found.said[1:]}", found.recoverable
        message = recovery_policy.trip(what, halts=settings.on_nonfinite == "halt", recoverable=recoverable)
        if message:
            self.metrics_logger.warn(message, self.progress.step + 1)
            self.progress = self.health_monitor.with_health_state(self.progress.skipping())
            return
        set_activity("looking for a checkpoint to go back to", self.progress.step, self._recovery_seconds)
        target = self._good_checkpoint() if settings.policy else None
        rung = recovery_policy.climb(what, can_roll_back=target is not None)
        told = f"{what}. "
        if target:
            path, saved = target
            self.checkpoints.load(path, self.model.parts, self.model.optimizers)
            recovery_policy.rolled_back(saved.step)
            self.progress = self.progress.back_to(saved)
            self.health_monitor.spikes.recent = saved.recent
            told += f"ROLLED BACK to {path}, and the text since is passed over"
            # So that it stays passed over if the run is resumed.
            self.must_save = True
        else:
            self.progress = self.progress.skipping()
            told += "There is no checkpoint to go back to"
        if rung == "lower_lr":
            told += (
                f"; the learning rate is LOWERED to {recovery_policy.lr_factor:g} of it for {settings.lr_steps} steps"
            )
        self.progress = self.health_monitor.with_health_state(self.progress)
        counts = f"{recovery_policy.state.rollbacks} rollbacks, {recovery_policy.state.lr_cuts} cuts so far"
        self.metrics_logger.warn(f"{told} ({counts})", self.progress.step)

    @property
    def _recovery_seconds(self) -> float:
        """Time for steps without compilation, for a save under way, and for loading."""
        job = self.config.job
        return max(job.timeout_seconds, job.startup_timeout_seconds, self.config.checkpoint.timeout_seconds)

    def _good_checkpoint(self) -> tuple[Path, Progress] | None:
        """The newest that was not saved amid bad steps; an older one if the last rollback was to no avail."""
        if not self.config.checkpoint.enable:
            return None
        self.checkpoints.wait()
        before = self.health_monitor.recovery_policy.steps_too_new
        return self.checkpoints.find_newest(before, lambda saved: not saved.health.get("bad_steps"))

    # Between steps -----------------------------------------------------------------------------------------

    def _validate(self, stage: StagePlan, batch_layout: BatchLayout) -> None:
        """Measure on held-out text, and end the stage if its gate opens. Collective."""
        found = self.evaluator.evaluate(
            stage, batch_layout, at_end=self._stage_over(), short_before=self.progress.short_loss
        )
        if found is None:
            return
        self.recorder.record_evaluation(stage, self.progress.step, found)
        if stage.index == 0:
            self.progress = dataclasses.replace(self.progress, short_loss=found.loss)
        if not stage.until:
            return
        verdict = self.evaluator.judge(stage, found)
        if verdict.opened:
            self.progress = dataclasses.replace(self.progress, stage_done=True)
            said = f"stage {stage.index + 1} ends after {self.progress.stage_step} of {stage.steps} steps"
        elif self._stage_over():
            said = f"stage {stage.index + 1} ends at max_tokens, and its gate did not open"
        else:
            said = f"stage {stage.index + 1} goes on"
        self.recorder.record_gate(stage, self.progress, verdict, said)

    def _asked(self) -> bool:
        """Whether a signal asked this rank to stop."""
        return self.signals.received is not None

    def _stop_and_save_requests(self) -> tuple[bool, bool]:
        """To stop, as a signal asked this rank, and to save, as it is time to."""
        return self._asked(), self.save_schedule.time_is_up()

    def _save_if_due(self, stage_end: bool) -> None:
        """Begin a checkpoint where one is due. Collective."""
        self.checkpoints.poll()
        due = self.time_is_up or self.save_schedule.step_is_due(self.progress.step) or stage_end or self.must_save
        if self.config.checkpoint.enable and due:
            begun = time.perf_counter()
            self._save(stage_end)
            self.recorder.checkpoint_seconds += time.perf_counter() - begun

    def _save(self, stage_end: bool) -> None:
        # A save before it may have to end first.
        set_activity("saving", self.progress.step, self.config.checkpoint.timeout_seconds)
        self.save_schedule.saved()
        self.must_save = False
        if self.health_monitor.has_nonfinite_weights():  # a start would take it, and a good one might go for it
            if self.world.rank == 0:
                logger.error("NO CHECKPOINT of step %d: a weight is not finite", self.progress.step)
            return
        self.checkpoints.save(self.progress, self.model.parts, self.model.optimizers, stage_end=stage_end)

    def _save_the_last(self) -> None:
        """Have the state as it is on disk, at the end of a run or before a stop.

        Raises:
            UserError: it cannot be written.
        """
        if self.config.checkpoint.enable:
            set_activity("waiting for the last checkpoint", self.progress.step, self.config.checkpoint.timeout_seconds)
            self.checkpoints.wait()
            if self.checkpoints.newest_step != self.progress.step:
                self._save(self._stage_over())
                self.checkpoints.wait()
            self.checkpoints.close()
            if self.checkpoints.newest_step != self.progress.step:
                raise UserError(
                    f"the last checkpoint, of step {self.progress.step}, could not be written to "
                    f"{self.checkpoints.folder}; the log above says why",
                    fix="mend that, and run the same command again: it goes on from the last good checkpoint",
                )
        if self.stopping:
            saved = "saved" if self.config.checkpoint.enable else "not saved, as checkpoint.enable = false"
            self.metrics_logger.say(
                f"stopped by a signal after step {self.progress.step} of {self.total_steps}; the state is {saved}. "
                "Run the same command again to go on."
            )
