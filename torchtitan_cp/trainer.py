"""The training loop. It reads top to bottom like the way of a batch; the rooms do the work."""

import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp import registry
from torchtitan_cp.attention import ContextParallel, Plan, attend, choose_strategy, sum_ranks
from torchtitan_cp.checkpoint import Checkpoints, Progress, SaveSchedule, check_identity
from torchtitan_cp.checkpoint.hub import start_from_hub
from torchtitan_cp.config import Config, ConfigError, UserError, to_toml
from torchtitan_cp.config.check import check_config, check_dump_folder
from torchtitan_cp.config.degrees import resolve_degrees
from torchtitan_cp.curriculum import (
    StagePlan,
    check_head_dim,
    describe_rope,
    judge,
    resolve_stages,
    rope_frequencies,
)
from torchtitan_cp.data import PreparedCorpus, SeparatedStore, TokenStream, prepare, statistics_table
from torchtitan_cp.data.loader import MicroBatch, StepShape, read_rows, read_steps
from torchtitan_cp.data.packing import Packing
from torchtitan_cp.data.samples import Sampling, StageSamples, held_out_samples
from torchtitan_cp.evaluation import mean_loss, unigram_loss
from torchtitan_cp.health import GradientProbe, NonFiniteError, Policy, StepReport, exchange
from torchtitan_cp.metrics import Console, MetricsWriter, StepRecord, find_peak, flops_per_token, layer_costs
from torchtitan_cp.metrics.console import StageSummary
from torchtitan_cp.optimizer import (
    IGNORED,
    LearningRates,
    VocabularyShard,
    build_optimizer,
    chunked_cross_entropy,
    scale_gradients,
    set_learning_rates,
    shard_square_norm,
)
from torchtitan_cp.parallel import (
    Hidden,
    Meshes,
    Pipeline,
    StopSignals,
    World,
    any_rank,
    bubble_share,
    check_shape,
    parallelize,
    plan_stages,
    seed_step,
    use_deterministic_kernels,
    vocabulary_part,
    wrap_blocks,
)
from torchtitan_cp.parallel.failure import doing

logger = logging.getLogger(__name__)


class LayerAttention:
    """What the model is handed, with the plan of each window that a layer has."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plans: dict[int, Plan], window: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of a layer that has this window."""
        return attend(q, k, v, plans[window], sinks=sinks)

    def sum_ranks(self, x: Tensor, plans: dict[int, Plan]) -> Tensor:
        """Sum over the ranks that share each sequence."""
        return sum_ranks(x, next(iter(plans.values())))


class Trainer:
    """One run of a config on the ranks of this job.

    Args:
        config: as read; checked here against the number of ranks.
        world: this process among them.

    Attributes:
        progress: where the run stands.
    """

    def __init__(self, config: Config, world: World) -> None:
        check_config(config, world.size)
        self.config, self.world, self.device = config, world, world.device
        self.folder = Path(config.job.dump_folder)
        self.stages = resolve_stages(config, world.size)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        begins = self._first_stage()
        registry.check_support(config, begins)
        degrees = resolve_degrees(dataclasses.replace(config.parallel, tp=begins.tp, pp=begins.pp), world.size)
        self.compute_dtype = getattr(torch, config.training.compute_dtype)
        if config.training.deterministic:
            use_deterministic_kernels()

        corpus = prepare(config.data, config.tokenizer)
        self._check_same_corpus(corpus.fingerprint)
        self.unigram_counts = corpus.unigram_counts
        self.statistics = {name: source.statistics for name, source in corpus.sources.items()}
        block_tokens = max(stage.seq_len for stage in self.stages)
        self._open_streams(corpus, block_tokens)

        shape = registry.with_vocabulary(registry.shape_of(config.model), corpus.tokenizer.vocab_size)
        check_shape(shape, degrees.tp)
        check_head_dim(self.stages, shape.head_dim)
        self.meshes = Meshes(self.device.device.type, degrees)
        self._build_parts(shape, begins)
        self.learning_rates = LearningRates(
            config.optimizer, config.lr_scheduler, [(stage.lr, stage.steps) for stage in self.stages]
        )
        self.probe = GradientProbe(next(iter(self.parts[0].layers.values())))  # type: ignore[operator]
        self.save_schedule, self.signals, self.stopping = SaveSchedule(config.checkpoint), StopSignals(), False
        # As it comes back from a checkpoint, where a tuple is a list.
        sizes = json.loads(json.dumps(dataclasses.asdict(shape)))
        identity = {"model": sizes, "data": corpus.fingerprint, "seed": config.training.seed}
        identity["optimizer"] = f"{config.optimizer.name}, state in {config.optimizer.state}"
        self.progress = Progress(identity=identity, block_tokens=block_tokens)
        self.validation_losses: tuple[float, float] | None = None

    def _open_streams(self, corpus: PreparedCorpus, block_tokens: int) -> None:
        """Of each source, by name: what is trained on, and what is held out where something is."""
        settings = self.config.data
        if settings.separator >= corpus.tokenizer.vocab_size:
            raise ConfigError(
                f"data.separator = {settings.separator} is no token: there are {corpus.tokenizer.vocab_size}",
                fix="give the id of one, or -1 for none",
            )

        def separated(store: Any) -> Any:
            return SeparatedStore(store, settings.separator) if settings.separator >= 0 else store

        self.streams = {
            name: TokenStream(separated(source.train), block_tokens, self.config.training.seed, order=settings.order)
            for name, source in corpus.sources.items()
        }
        self.held_out = {
            name: TokenStream(separated(source.validation), block_tokens, 0, shuffle=False)
            for name, source in corpus.sources.items()
            if source.validation.tokens
        }
        if not self.held_out and any(stage.until for stage in self.stages):
            raise ConfigError(
                "a stage has until, which looks at held-out text, and no source holds any out",
                fix="set validation_fraction of a source above 0, or give the stage steps",
            )

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
        self.saved = self.checkpoints.read_progress() if self.config.checkpoint.enable else None
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

    def _build_parts(self, shape: Any, begins: StagePlan) -> None:
        """This rank's parts of the network, sharded and filled: all of it, or its stages of the pipeline.

        The attention follows the plan that comes with each batch.
        """
        self.shape, settings, mesh = shape, self.config.parallel, self.meshes.pp
        config = dataclasses.replace(self.config, activation=begins.activation)
        self.activation = begins.activation
        architecture, ranks = registry.architecture(self.config.model), mesh.size()
        costs = layer_costs(shape, max(stage.seq_len for stage in self.stages))
        self.layers = plan_stages(settings, ranks, costs)
        self.parts = nn.ModuleList()
        for number in self.layers.of(mesh.get_local_rank()):
            with torch.device("meta"):
                part = architecture.build(shape, LayerAttention())
                whole = {name: parameter.numel() for name, parameter in part.named_parameters()}
                part.keep(*self.layers.layers[number])  # type: ignore[operator]
            parallelize(part, self.meshes, architecture.sharding, config)
            self.parts.append(part)
        self.parameter_count = sum(whole.values())
        self.parameter_names = list(whole)
        self._build_optimizers()
        self.pipeline = None
        if ranks > 1:
            schedule, device = settings.pp_schedule, self.device.device
            self.pipeline = Pipeline(list(self.parts), self.layers, mesh, schedule, device, tied=shape.tie_embeddings)

    def _build_optimizers(self) -> None:
        self.optimizers = [
            build_optimizer(part, self.config.optimizer, compute_dtype=self.compute_dtype, names=self.parameter_names)
            for part in self.parts
        ]

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

    def run(self) -> None:
        """Train what is left of the curriculum; a finished run says so."""
        self.patience_seconds = self.config.job.startup_timeout_seconds
        doing("looking for a checkpoint to go on from", 0, self.patience_seconds)
        self._resume()
        leads = self.world.rank == 0
        self.console = Console(self.total_steps, self.progress.step, speaks=leads)
        if self.finished:
            self.console.say(f"{self.folder} is finished: all {self.total_steps} steps are trained. Nothing to do.")
            return
        self._open_logs(leads)
        self.console.start()
        try:
            with self.signals:
                self._train()
            if self.relaunches and not self.stopping:
                self.console.say(self._relaunching())
            elif not self.stopping:
                self.console.finish(self._summaries(), self._closing())
        finally:
            self.console.stop()
            if self.writer:
                self.writer.close()

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

    # A run's beginning -------------------------------------------------------------------------------------

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
        self.checkpoints.load(path, self.parts, self.optimizers)
        self.progress = dataclasses.replace(
            saved, block_tokens=self.progress.block_tokens, identity=self.progress.identity
        )
        logger.info("resumed from %s: %d of %d steps are done", path, saved.step, self.total_steps)

    def _start_from_hub(self) -> None:
        """Take the weights of model.hub_checkpoint, if the config names one."""
        model, rope = self.config.model, self.stages[0].rope
        if model.hub_checkpoint:
            start_from_hub(Path(model.hub_checkpoint), self.parts, registry.hub_of(model).names, rope)

    def _open_logs(self, leads: bool) -> None:
        config, rank_peak = self.config, self.config.metrics.peak_tflops
        self.policy = Policy(config.health, self.progress.consecutive_skips)
        self.peak = find_peak(self.device.device, self.device.name, self.compute_dtype, rank_peak)
        self.stage_speeds: dict[int, float] = {}
        self.writer = None
        if leads:
            check_dump_folder(config.job.dump_folder)
            (self.folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
            self.writer = MetricsWriter(
                self.folder,
                after_step=self.progress.step,
                tensorboard=config.metrics.tensorboard,
                interval=config.metrics.interval,
            )
            self.writer.text("config", f"```toml\n{to_toml(config)}\n```", self.progress.step)
            for name, stream in self.streams.items():
                self.writer.lengths(name, stream.store.document_lengths)
        self.console.say(
            f"{config.model.architecture} {config.model.flavor}: {self.parameter_count:,} parameters on "
            f"{self.world.size} x {self.device.name}, {self.device.backend}, "
            f"compute in {config.training.compute_dtype}\n"
            f"peak {self.peak.flops_per_second / 1e12:.3g} TFLOP/s a rank: {self.peak.source}\n"
            f"{self.meshes.describe()}\n"
            f"{statistics_table(self.statistics)}"
        )

    # A stage -------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: StagePlan) -> None:
        """Take the stage's steps that are left: new groups, frequencies and loader; the weights stay."""
        begun = time.perf_counter()
        # Its first step may compile.
        self.patience_seconds = self.config.job.startup_timeout_seconds
        doing(f"entering stage {stage.index + 1}", self.progress.step + 1, self.patience_seconds)
        shape = self.enter_stage(stage)
        if stage.resets_optimizer and self.progress.stage_step == 0:
            self._build_optimizers()
        left = stage.steps - self.progress.stage_step
        batches = read_steps(
            self.samples,
            self.progress.stage_step,
            left,
            shape,
            workers=self.config.data.workers,
            read_ahead=self.config.data.prefetch_batches,
            pin=self.device.device.type == "cuda",
        )
        first = next(batches)
        self._announce(stage, shape, time.perf_counter() - begun)
        batches = itertools.chain([first], batches)
        if "short_loss_rise" in stage.until and self.progress.stage_step == 0:
            loss, _ = self._held_out_loss(self._at_shortest(shape), self.config.evaluation.tokens)
            self.progress = dataclasses.replace(self.progress, short_loss=loss)
        for _ in range(left):
            self._step(stage, batches)
            self.patience_seconds = self.config.job.timeout_seconds
            if self._due(self.config.evaluation.interval) or self._stage_over():
                self._validate(stage, shape)
            self._save_if_due(self._stage_over())
            if self._stage_over():
                epochs = self.samples.epochs_after(self.progress.stage_step).items()
                self.console.say("read so far: " + ", ".join(f"{name} {count:.2f} times" for name, count in epochs))
            if self._stage_over() or self.stopping:
                return

    def _leave_stage(self) -> None:
        """Go on to the next stage, which reads on where this one stopped."""
        taken = self._samples_of(self.stages[self.progress.stage]).tokens_after(self.progress.stage_step)
        self.progress = dataclasses.replace(
            self.progress,
            stage=self.progress.stage + 1,
            stage_step=0,
            stage_done=False,
            source_tokens=self.progress.source_tokens | taken,
        )

    def _samples_of(self, stage: StagePlan) -> StageSamples:
        weights = stage.data.mixture or {name: float(stream.store.tokens) for name, stream in self.streams.items()}
        text = stage.data
        packing = Packing(text.packing, text.packing_window, text.document_mask, text.restart_positions)
        sampling = Sampling(
            weights,
            packing,
            text.short_share,
            text.short_seq_len,
            text.growth_from,
            text.growth_steps,
            self.config.data.max_epochs,
        )
        sequences = stage.global_batch_tokens // stage.seq_len
        seed, before = self.config.training.seed, self.progress.source_tokens
        return StageSamples(self.streams, stage.seq_len, sampling, seed, stage.index, sequences, before, stage.steps)

    def enter_stage(self, stage: StagePlan) -> StepShape:
        """Make the stage's groups, frequencies, samples and policy of what is kept. Collective.

        Returns:
            how its steps are dealt out.
        """
        self.samples = self._samples_of(stage)
        if stage.activation != self.activation:
            self.activation = stage.activation
            for part in self.parts:
                wrap_blocks(part, stage.activation, self.config.compile, self.device.device.type)
        mesh = self.meshes.for_cp(stage.cp)
        settings = self.config.context_parallel
        hybrid = stage.strategy == "hybrid"
        # Tensor-parallel peers share a stream of random numbers, as they share what they compute.
        self.role = tuple(mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp"))
        cp_mesh = self.meshes.for_hybrid(stage.cp, stage.all_to_all_ranks) if hybrid else mesh["cp"]
        self.context_parallel = ContextParallel(
            cp_mesh, stage.strategy, settings.kernel, settings.layout, settings.kv_transfer
        )
        frequencies, factor = rope_frequencies(stage.rope, self.shape.head_dim, stage.seq_len)
        for part in self.parts:
            part.set_rope(frequencies, factor, self.device.device)  # type: ignore[operator]
        return StepShape(
            stage.seq_len,
            stage.micro_batches,
            stage.micro_batch_sequences,
            stage.dp,
            mesh.get_local_rank("dp"),
            self.context_parallel.planner(),
            tuple(sorted({0, *self.shape.windows})),
        )

    def _announce(self, stage: StagePlan, shape: StepShape, seconds: float) -> None:
        first = self.progress.step - self.progress.stage_step
        about = (
            f"stage {stage.index + 1} of {len(self.stages)}: {stage.name}, sequences of {stage.seq_len:,} tokens, "
            f"{stage.global_batch_tokens:,} tokens a step, cp {stage.cp} x dp {stage.dp}, "
            f"attention by {self._exchange_of(shape)}, rope {describe_rope(stage.rope)}, "
            f"steps {first + 1} to {first + stage.steps}; entered in {seconds:.1f} s"
        )
        about += self._text_of(stage)
        if self.pipeline:
            per_rank, settings = len(self.parts), self.config.parallel
            bubble = bubble_share(settings, self.pipeline.ranks, per_rank, stage.micro_batches)
            layers = ", ".join(f"{first} to {stop - 1}" for first, stop in self.layers.layers)
            about += f"; pipeline {settings.pp_schedule}, layers {layers}; {bubble:.0%} of a step is bubble"
        self.console.say(about)
        if self.writer:
            self.writer.text("stage", about, self.progress.step)

    def _text_of(self, stage: StagePlan) -> str:
        """What is special about the text of a stage."""
        text, said = stage.data, []
        if len(self.streams) > 1:
            total = sum(self.samples.sampling.weights.values())
            shares = (f"{name} {weight / total:.0%}" for name, weight in self.samples.sampling.weights.items())
            said.append("mixture " + ", ".join(shares))
        if text.packing != "concat":
            largest = max(self.samples.packed.values(), key=lambda packed: packed.samples or 0)
            whole = largest.report(0).whole_fraction
            said.append(f"packed by {text.packing}, {whole:.0%} of the first window's documents whole")
        if text.document_mask:
            said.append("documents masked")
        if text.short_share:
            said.append(f"{text.short_share:.0%} of the sequences in stretches of {text.short_seq_len:,}")
        if text.growth_from:
            said.append(f"attention grows from {text.growth_from:,} over {text.growth_steps} steps")
        if stage.resets_optimizer:
            said.append("optimizer state reset")
        return "".join("; " + each for each in said)

    def _exchange_of(self, shape: StepShape) -> str:
        """The strategy, and for `auto` what it came to."""
        tp = self.meshes.degrees.tp
        plan, heads = shape.plans()[0], (self.shape.n_heads // tp, self.shape.n_kv_heads // tp)
        return plan.strategy if plan.strategy != "auto" else choose_strategy(*heads, plan.ranks, plan.mask.band)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.step % interval == 0

    # A step --------------------------------------------------------------------------------------------------

    def _step(self, stage: StagePlan, batches: Iterator[tuple[MicroBatch, ...]]) -> None:
        """One optimizer step: read, run forward and backward, look, update, tell."""
        begun = time.perf_counter()
        doing("waiting for its batch", self.progress.step + 1, self.patience_seconds)
        micro_batches = next(batches)
        waited = time.perf_counter() - begun

        doing("in forward, backward and update with the others", self.progress.step + 1, self.patience_seconds)
        seed_step(self.config.training.seed, stage.index, self.progress.stage_step, self.role)
        lr = self.learning_rates.at(stage.index, self.progress.stage_step)
        report = self.gradients(micro_batches)
        skipped = self._update_or_skip(stage, report, lr)
        self.progress = dataclasses.replace(
            self.progress,
            step=self.progress.step + 1,
            stage_step=self.progress.stage_step + 1,
            cursor=self.progress.cursor + stage.global_batch_tokens,
            consecutive_skips=self.policy.consecutive_skips,
        )
        self._tell(stage, report, lr=lr, waited=waited, seconds=time.perf_counter() - begun, skipped=skipped)

    def gradients(self, micro_batches: tuple[MicroBatch, ...]) -> StepReport:
        """Forward and backward of a step. The loss is divided once, by the tokens of all ranks."""
        tokens = self._count_tokens(micro_batches)
        loss_sum = torch.zeros((), device=self.device.device)

        def run(forward: Callable[..., Any], state: Tensor | None, batch: MicroBatch) -> Tensor:
            result = self._forward(forward, state, batch)
            if isinstance(result, Tensor):
                return result
            loss_sum.add_(result[1].sum())
            return result[0] / tokens

        if self.pipeline:
            self.pipeline.step(micro_batches, self._hidden(micro_batches[0]), run)
        else:
            for batch in micro_batches:
                run(self.parts[0], None, batch).backward()
        counted = self.pipeline.counted if self.pipeline else self.parts.parameters()
        square_norm = shard_square_norm(counted, self.world.size // self.meshes.pp.size())
        gradient = self.probe.take(self.device.device)
        loss_sum *= self.meshes.counts_losses
        return exchange(loss_sum, tokens, gradient, square_norm, self.device.peak_memory_bytes())

    def _count_tokens(self, micro_batches: tuple[MicroBatch, ...]) -> Tensor:
        """Unmasked tokens of the step over every rank, at least 1."""
        count = sum(int((batch.labels != IGNORED).sum()) for batch in micro_batches)
        tokens = torch.tensor(count if self.meshes.counts_tokens else 0, dtype=torch.int64, device=self.device.device)
        dist.all_reduce(tokens)
        return tokens.clamp_min(1)

    def _forward(self, forward: Callable[..., Any], state: Tensor | None, batch: MicroBatch) -> Any:
        """A part's forward on a micro-batch, from the hidden states before it or from the tokens.

        Returns:
            of the last part (sum to differentiate, loss of each token `[B, S/cp]`), else hidden states.
        """
        tokens, labels, positions = (self.device.move(x) for x in (batch.tokens, batch.labels, batch.positions))
        chunk, z_loss = self.config.training.loss_chunk_tokens, self.config.training.z_loss

        def head(hidden: Tensor, output: nn.Linear) -> tuple[Tensor, Tensor]:
            hidden, weight, group, first = vocabulary_part(hidden, output.weight)
            vocabulary = VocabularyShard(group, first) if group else None
            return chunked_cross_entropy(hidden, weight, labels, chunk, vocabulary=vocabulary, z_loss=z_loss)

        return forward(tokens if state is None else state, positions, batch.plans, head)

    def _hidden(self, batch: MicroBatch) -> Hidden:
        """What travels between stages of the pipeline."""
        sequences, length = batch.tokens.shape
        return Hidden((sequences, length // self.meshes.degrees.tp, self.shape.dim), self.compute_dtype)

    def _update_or_skip(self, stage: StagePlan, report: StepReport, lr: float) -> bool:
        """Let the optimizer run, unless a number is not finite on any rank. Returns whether it was skipped."""
        if report.findings:
            self._forget_gradients()
            where = f"step {self.progress.step + 1} (stage {stage.index + 1}, {stage.name})"
            message = self.policy.trip(where, report.findings)
            if self.world.rank == 0:
                logger.warning(message)
            return True
        self.policy.finite()
        scale_gradients(self.parts.parameters(), report.grad_norm, self.config.training.max_grad_norm)
        for optimizer in self.optimizers:
            set_learning_rates(optimizer, lr)
            optimizer.step()
        self._forget_gradients()
        return False

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _tell(
        self, stage: StagePlan, report: StepReport, *, lr: float, waited: float, seconds: float, skipped: bool
    ) -> None:
        """Record the step. Nothing here changes it."""
        speed = stage.global_batch_tokens / seconds
        flops = flops_per_token(
            self.shape.linear_parameters(),
            self.shape.layer_windows,
            self.shape.n_heads,
            self.shape.head_dim,
            stage.seq_len,
        )
        record = StepRecord(
            step=self.progress.step,
            stage=stage.name,
            stage_index=stage.index,
            seq_len=stage.seq_len,
            cp=stage.cp,
            tokens=self.progress.cursor,
            loss=None if skipped else report.loss,
            grad_norm=None if skipped else report.grad_norm,
            lr=lr,
            tokens_per_second=speed,
            tokens_per_second_per_rank=speed / self.world.size,
            mfu=speed * flops / (self.peak.flops_per_second * self.world.size),
            peak_memory_bytes=report.peak_memory_bytes,
            data_wait_seconds=waited,
            step_seconds=seconds,
            skipped=skipped,
        )
        if not skipped:
            first = self.progress.stage_losses.get(str(stage.index), [report.loss])[0]
            row = [first, report.loss, float(self.progress.stage_step)]
            stage_losses = {**self.progress.stage_losses, str(stage.index): row}
            self.progress = dataclasses.replace(self.progress, stage_losses=stage_losses)
        before = self.stage_speeds.get(stage.index, speed)
        self.stage_speeds[stage.index] = 0.9 * before + 0.1 * speed
        if self.writer:
            self.writer.step(record)
        self.console.step(record, self.total_steps)

    # Between steps -------------------------------------------------------------------------------------------

    def _validate(self, stage: StagePlan, shape: StepShape) -> None:
        """Mean loss on held-out text at the stage's length, beside a unigram model's on the same tokens."""
        loss, unigram = self._held_out_loss(shape, self.config.evaluation.tokens)
        if loss is None or unigram is None:
            return
        self.validation_losses = (loss, unigram)
        step = self.progress.step
        self.console.say(
            f"validation at step {step}: loss {loss:.4f} on held-out text at length {stage.seq_len:,} "
            f"(a unigram model: {unigram:.4f})"
        )
        if self.writer:
            self.writer.validation(step, loss, unigram)
        if stage.until:
            self._judge(stage, shape, loss)

    def _judge(self, stage: StagePlan, shape: StepShape, loss: float) -> None:
        """End the stage if its gate opens; say what it looked at."""
        measured = {"validation_loss": loss}
        if "short_loss_rise" in stage.until:
            short, _ = self._held_out_loss(self._at_shortest(shape), self.config.evaluation.tokens)
            if short is not None and self.progress.short_loss is not None:
                measured["short_loss_rise"] = short / self.progress.short_loss - 1
        opened, why = judge(stage.until, measured)
        if opened:
            self.progress = dataclasses.replace(self.progress, stage_done=True)
            said = f"stage {stage.index + 1} ends after {self.progress.stage_step} of {stage.steps} steps"
        elif self._stage_over():
            said = f"stage {stage.index + 1} ends at max_tokens, and its gate did not open"
        else:
            said = f"stage {stage.index + 1} goes on"
        self.console.say(f"{said}: {why}")
        if self.writer:
            self.writer.text("gate", f"{said}: {why}", self.progress.step)

    def _at_shortest(self, shape: StepShape) -> StepShape:
        """The stage's layout at the length of the curriculum's shortest stage."""
        return dataclasses.replace(shape, seq_len=min(stage.seq_len for stage in self.stages))

    def _held_out_loss(self, shape: StepShape, tokens: int) -> tuple[float | None, float | None]:
        """Mean loss on held-out text of the stage's sources, and a unigram model's on it; None without such text.

        Args:
            shape: gives the length, and who reads what.
            tokens: at least one round on all ranks is read.
        """
        shape = dataclasses.replace(shape, micro_batches=1)
        sampling = self.samples.sampling
        held_out = held_out_samples(self.held_out, shape.seq_len, sampling.weights, sampling.packing, shape.sequences)
        if held_out is None:
            return None, None
        rounds = max(1, tokens // shape.tokens)
        own = shape.dp_rank * shape.micro_batch_sequences
        batches = (
            read_rows(held_out, shape, [first + own + row for row in range(shape.micro_batch_sequences)])
            for first in range(0, rounds * shape.sequences, shape.sequences)
        )

        def summed(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            doing("validating with the others", self.progress.step, self.patience_seconds)
            count = (batch.labels != IGNORED).sum().to(self.device.device)
            if self.pipeline:
                result = self.pipeline.evaluate(batch, self._hidden(batch), self._forward)
            else:
                result = self._forward(self.parts[0], None, batch)
            loss = torch.zeros_like(count) if result is None else result[1].sum()
            return loss * self.meshes.counts_losses, count * self.meshes.counts_tokens

        loss = mean_loss(self.parts, batches, summed)
        labels = np.concatenate([held_out.sequence(number).labels for number in range(rounds * shape.sequences)])
        return loss, unigram_loss(self.unigram_counts, labels[labels != IGNORED])

    def _save_if_due(self, stage_end: bool) -> None:
        """Begin a checkpoint where one is due, and see whether a signal asks any rank to stop. Collective."""
        self.checkpoints.poll()
        self.stopping, time_is_up = any_rank(
            self.signals.received is not None, self.save_schedule.time_is_up(), device=self.device.device
        )
        due = time_is_up or self.save_schedule.step_is_due(self.progress.step) or stage_end
        if self.config.checkpoint.enable and due:
            self._save(stage_end)

    def _save(self, stage_end: bool) -> None:
        # A save before it may have to end first.
        doing("saving", self.progress.step, self.config.checkpoint.timeout_seconds)
        self.save_schedule.saved()
        self.checkpoints.save(self.progress, self.parts, self.optimizers, stage_end=stage_end)

    def _save_the_last(self) -> None:
        """Have the state as it is on disk, at the end of a run or before a stop.

        Raises:
            UserError: it cannot be written.
        """
        if self.config.checkpoint.enable:
            doing("waiting for the last checkpoint", self.progress.step, self.config.checkpoint.timeout_seconds)
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
            self.console.say(
                f"stopped by a signal after step {self.progress.step} of {self.total_steps}; the state is {saved}. "
                "Run the same command again to go on."
            )

    # A run's end ---------------------------------------------------------------------------------------------

    def _summaries(self) -> list[StageSummary]:
        rows = []
        for stage in self.stages:
            first, last, steps = self.progress.stage_losses.get(str(stage.index), [None, None, 0])
            speed = self.stage_speeds.get(stage.index)
            rows.append(StageSummary(stage.name, stage.seq_len, stage.cp, int(steps or 0), first, last, speed))
        return rows

    def _closing(self) -> str:
        """What to look at next, with the last validation."""
        lines = []
        if self.validation_losses:
            loss, unigram = self.validation_losses
            lines.append(f"validation loss {loss:.4f} on held-out text; a unigram model has {unigram:.4f}")
        if self.config.checkpoint.enable:
            lines.append(f"checkpoints: {self.checkpoints.folder}")
        lines.append(f"every step:  {self.folder / 'metrics.jsonl'}")
        if self.config.metrics.tensorboard:
            lines.append(f"look at it:  tensorboard --logdir {self.folder / 'tensorboard'}")
        return "\n".join(lines)
