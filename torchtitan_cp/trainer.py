"""The training loop. It reads top to bottom like the way of a batch; the rooms do the work."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp import registry
from torchtitan_cp.attention import ContextParallel, Plan, attend, choose_strategy, sum_ranks
from torchtitan_cp.checkpoint import Checkpoints, Progress
from torchtitan_cp.checkpoint.hub import start_from_hub
from torchtitan_cp.checkpoint.store import check_identity
from torchtitan_cp.config import Config, ConfigError, to_toml
from torchtitan_cp.config.check import check_config, check_dump_folder
from torchtitan_cp.curriculum import StagePlan, check_head_dim, resolve_stages, rope_frequencies, stage_of
from torchtitan_cp.data import TokenStream, prepare
from torchtitan_cp.data.loader import MicroBatch, StepShape, read_step, read_steps
from torchtitan_cp.evaluation import mean_loss, unigram_loss
from torchtitan_cp.health import GradientProbe, Policy, StepReport, exchange
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
    World,
    bubble_share,
    check_shape,
    parallelize,
    plan_stages,
    seed_step,
    use_deterministic_kernels,
    vocabulary_part,
)

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
        degrees = check_config(config, world.size)
        registry.check_support(config, degrees)
        self.config, self.world, self.device = config, world, world.device
        self.folder = Path(config.job.dump_folder)
        self.stages = resolve_stages(config, degrees)
        self.total_steps = self.stages[-1].last_step
        self.compute_dtype = getattr(torch, config.training.compute_dtype)
        if config.training.deterministic:
            use_deterministic_kernels()

        corpus = prepare(config.data, config.tokenizer)
        self._check_same_corpus(corpus.fingerprint)
        self.unigram_counts = corpus.unigram_counts
        block_tokens = max(stage.seq_len for stage in self.stages)
        self.stream = TokenStream(corpus.train, block_tokens, config.training.seed)
        self.held_out = (
            TokenStream(corpus.validation, block_tokens, 0, shuffle=False) if corpus.validation.tokens else None
        )

        shape = registry.with_vocabulary(registry.shape_of(config.model), corpus.tokenizer.vocab_size)
        check_shape(shape, degrees.tp)
        check_head_dim(self.stages, shape.head_dim)
        self.meshes = Meshes(self.device.device.type, degrees)
        self._build_parts(shape)
        self.learning_rates = LearningRates(
            config.optimizer, config.lr_scheduler, [(stage.lr, stage.steps) for stage in self.stages]
        )
        self.probe = GradientProbe(next(iter(self.parts[0].layers.values())))  # type: ignore[operator]
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
        # As it comes back from a checkpoint, where a tuple is a list.
        sizes = json.loads(json.dumps(dataclasses.asdict(shape)))
        identity = {"model": sizes, "data": corpus.fingerprint, "seed": config.training.seed}
        identity["optimizer"] = f"{config.optimizer.name}, state in {config.optimizer.state}"
        self.progress = Progress(identity=identity, block_tokens=block_tokens)
        self.validation_losses: tuple[float, float] | None = None

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

    def _build_parts(self, shape: Any) -> None:
        """This rank's parts of the network, sharded and filled: all of it, or its stages of the pipeline.

        The attention follows the plan that comes with each batch.
        """
        self.shape, settings, mesh = shape, self.config.parallel, self.meshes.pp
        architecture, ranks = registry.architecture(self.config.model), mesh.size()
        costs = layer_costs(shape, max(stage.seq_len for stage in self.stages))
        self.layers = plan_stages(settings, ranks, costs)
        self.parts = nn.ModuleList()
        for number in self.layers.of(mesh.get_local_rank()):
            with torch.device("meta"):
                part = architecture.build(shape, LayerAttention())
                whole = {name: parameter.numel() for name, parameter in part.named_parameters()}
                part.keep(*self.layers.layers[number])  # type: ignore[operator]
            parallelize(part, self.meshes, architecture.sharding, self.config)
            self.parts.append(part)
        self.parameter_count = sum(whole.values())
        self.optimizers = [
            build_optimizer(part, self.config.optimizer, compute_dtype=self.compute_dtype, names=whole)
            for part in self.parts
        ]
        self.pipeline = None
        if ranks > 1:
            schedule, device = settings.pp_schedule, self.device.device
            self.pipeline = Pipeline(list(self.parts), self.layers, mesh, schedule, device, tied=shape.tie_embeddings)

    def run(self) -> None:
        """Train what is left of the curriculum; a finished run says so."""
        self._resume()
        leads = self.world.rank == 0
        self.console = Console(self.total_steps, self.progress.step, speaks=leads)
        if self.progress.step >= self.total_steps:
            self.console.say(f"{self.folder} is finished: all {self.total_steps} steps are trained. Nothing to do.")
            return
        self._open_logs(leads)
        self.console.start()
        try:
            while self.progress.step < self.total_steps:
                self._run_stage(stage_of(self.stages, self.progress.step))
            self.console.finish(self._summaries(), self._closing())
        finally:
            self.console.stop()
            if self.writer:
                self.writer.close()

    # A run's beginning -------------------------------------------------------------------------------------

    def _resume(self) -> None:
        found = self.checkpoints.read_progress() if self.config.checkpoint.enable else None
        if found is None:
            self._start_from_hub()
            return
        path, saved = found
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
        self.console.say(
            f"{config.model.architecture} {config.model.flavor}: {self.parameter_count:,} parameters on "
            f"{self.world.size} x {self.device.name}, {self.device.backend}, "
            f"compute in {config.training.compute_dtype}\n"
            f"peak {self.peak.flops_per_second / 1e12:.3g} TFLOP/s a rank: {self.peak.source}\n"
            f"{self.meshes.describe()}\n"
            f"train {self.stream.store.tokens:,} tokens in {self.stream.store.documents:,} documents"
        )

    # A stage -------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: StagePlan) -> None:
        """Take the stage's steps that are left: new groups, frequencies and loader; the weights stay."""
        shape = self.enter_stage(stage)
        self._announce(stage, shape)
        left = stage.last_step - self.progress.step
        batches = read_steps(
            self.stream,
            self.progress.cursor,
            left,
            shape,
            read_ahead=self.config.data.prefetch_batches,
            pin=self.device.device.type == "cuda",
        )
        for _ in range(left):
            self._step(stage, batches)
            at_end = self.progress.step == stage.last_step
            if self._due(self.config.evaluation.interval) or at_end:
                self._validate(stage, shape)
            if self.config.checkpoint.enable and (self._due(self.config.checkpoint.interval) or at_end):
                self._save()

    def enter_stage(self, stage: StagePlan) -> StepShape:
        """Make the stage's groups and set its frequencies. Returns how its steps are dealt out. Collective."""
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
            self.context_parallel.plan(stage.seq_len),
        )

    def _announce(self, stage: StagePlan, shape: StepShape) -> None:
        about = (
            f"stage {stage.index + 1} of {len(self.stages)}: {stage.name}, sequences of {stage.seq_len:,} tokens, "
            f"{stage.global_batch_tokens:,} tokens a step, cp {stage.cp} x dp {stage.dp}, "
            f"attention by {self._exchange_of(shape)}, rope theta {stage.rope.theta:g}, "
            f"steps {stage.first_step + 1} to {stage.last_step}"
        )
        if self.pipeline:
            per_rank, settings = len(self.parts), self.config.parallel
            bubble = bubble_share(settings, self.pipeline.ranks, per_rank, stage.micro_batches)
            layers = ", ".join(f"{first} to {stop - 1}" for first, stop in self.layers.layers)
            about += f"; pipeline {settings.pp_schedule}, layers {layers}; {bubble:.0%} of a step is bubble"
        self.console.say(about)
        if self.writer:
            self.writer.text("stage", about, self.progress.step)

    def _exchange_of(self, shape: StepShape) -> str:
        """The strategy, and for `auto` what it came to."""
        tp = self.config.parallel.tp
        plan, heads = shape.plan, (self.shape.n_heads // tp, self.shape.n_kv_heads // tp)
        return plan.strategy if plan.strategy != "auto" else choose_strategy(*heads, plan.ranks, plan.mask.band)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.step % interval == 0

    # A step --------------------------------------------------------------------------------------------------

    def _step(self, stage: StagePlan, batches: Iterator[tuple[MicroBatch, ...]]) -> None:
        """One optimizer step: read, run forward and backward, look, update, tell."""
        begun = time.perf_counter()
        micro_batches = next(batches)
        waited = time.perf_counter() - begun

        seed_step(self.config.training.seed, stage.index, self.progress.step, self.role)
        lr = self.learning_rates.at(self.progress.step)
        report = self.gradients(micro_batches)
        skipped = self._update_or_skip(stage, report, lr)
        self.progress = dataclasses.replace(
            self.progress,
            step=self.progress.step + 1,
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

        return forward(tokens if state is None else state, positions, self._layer_plans(batch.plan), head)

    def _layer_plans(self, plan: Plan) -> dict[int, Plan]:
        """The plan of each window that a layer has; all of them on the layout of the batch's own."""
        return {
            window: self.context_parallel.plan(
                plan.sequence_length, dataclasses.replace(plan.mask, window=(window - 1, -1)), like=plan
            )
            if window
            else plan
            for window in set(self.shape.windows)
        }

    def _hidden(self, batch: MicroBatch) -> Hidden:
        """What travels between stages of the pipeline."""
        sequences, length = batch.tokens.shape
        return Hidden((sequences, length // self.config.parallel.tp, self.shape.dim), self.compute_dtype)

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
            losses = self.progress.stage_losses.get(str(stage.index), [report.loss])
            stage_losses = {**self.progress.stage_losses, str(stage.index): [losses[0], report.loss]}
            self.progress = dataclasses.replace(self.progress, stage_losses=stage_losses)
        before = self.stage_speeds.get(stage.index, speed)
        self.stage_speeds[stage.index] = 0.9 * before + 0.1 * speed
        if self.writer:
            self.writer.step(record)
        self.console.step(record)

    # Between steps -------------------------------------------------------------------------------------------

    def _validate(self, stage: StagePlan, shape: StepShape) -> None:
        """Mean loss on held-out text at the stage's length, beside a unigram model's on the same tokens."""
        if self.held_out is None:
            return
        shape = dataclasses.replace(shape, micro_batches=1)
        rounds = max(1, self.config.evaluation.tokens // shape.tokens)
        cursors = [index * shape.tokens for index in range(rounds)]
        batches = (read_step(self.held_out, cursor, shape)[0] for cursor in cursors)

        def summed(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            count = (batch.labels != IGNORED).sum().to(self.device.device)
            if self.pipeline:
                result = self.pipeline.evaluate(batch, self._hidden(batch), self._forward)
            else:
                result = self._forward(self.parts[0], None, batch)
            loss = torch.zeros_like(count) if result is None else result[1].sum()
            return loss * self.meshes.counts_losses, count * self.meshes.counts_tokens

        loss = mean_loss(self.parts, batches, summed)
        _, labels = self.held_out.sequence(0, rounds * shape.tokens)
        unigram = unigram_loss(self.unigram_counts, labels)
        self.validation_losses = (loss, unigram)
        step = self.progress.step
        self.console.say(
            f"validation at step {step}: loss {loss:.4f} on {rounds * shape.tokens:,} held-out tokens "
            f"at length {stage.seq_len:,} (a unigram model: {unigram:.4f})"
        )
        if self.writer:
            self.writer.validation(step, loss, unigram)

    def _save(self) -> None:
        self.checkpoints.save(self.progress, self.parts, self.optimizers)

    # A run's end ---------------------------------------------------------------------------------------------

    def _summaries(self) -> list[StageSummary]:
        rows = []
        for stage in self.stages:
            first, last = self.progress.stage_losses.get(str(stage.index), [None, None])
            speed = self.stage_speeds.get(stage.index)
            rows.append(StageSummary(stage.name, stage.seq_len, stage.cp, stage.steps, first, last, speed))
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
