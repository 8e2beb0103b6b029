"""The model on this rank: its parts, sharded and filled, their optimizers, and what a stage of the curriculum sets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_cp import attention
from torchtitan_cp.attention import AttentionMask, ContextParallel, Plan
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.attention.ring_cost import assumed_pairs_per_row
from torchtitan_cp.attention.strategies import log_choice
from torchtitan_cp.config.contract import Head, LanguageModel, ModelArgs
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.curriculum import ResolvedStage, rope_frequencies
from torchtitan_cp.data.batches.micro_batches import BatchLayout, MicroBatch
from torchtitan_cp.metrics.throughput import adapter_flops_per_token, flops_per_token, layer_costs
from torchtitan_cp.optim.build import build_optimizer, set_learning_rates
from torchtitan_cp.optim.clip import square_norms, step_clipped
from torchtitan_cp.optim.loss import ChunkedCrossEntropy, VocabularyShard
from torchtitan_cp.optim.router_bias import update_router_biases
from torchtitan_cp.optim.rules import check_rules
from torchtitan_cp.parallel.apply import parallelize
from torchtitan_cp.parallel.blocks import uncompiled_blocks, wrap_blocks
from torchtitan_cp.parallel.experts import Routing, RoutingSums, dispatch_experts
from torchtitan_cp.parallel.lora import freeze_base
from torchtitan_cp.parallel.lora_targets import check_pipeline_targets
from torchtitan_cp.parallel.mesh import Meshes
from torchtitan_cp.parallel.pipeline import Forward, Pipeline
from torchtitan_cp.parallel.pipeline_stages import bubble_fraction, plan_pipeline
from torchtitan_cp.parallel.stopwatch import Stopwatch
from torchtitan_cp.runtime.device import World
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import ResolvedRun, layer_heads
from torchtitan_cp.training.step_loss import LossHead, add_loss, count_step, output_rows

Result = TypeVar("Result")
# (hidden `[B, S/cp, E]`, this rank's rows of the output matrix, labels `[B, S/cp]`, which rows those are) -> any result
Compute = Callable[[Tensor, Tensor, Tensor, VocabularyShard | None], Result]
WATCHED = ("forward", "backward", "optimizer", "cp_wait", "cp_flight")


class LayerAttention:
    """The attention that the model calls. Its plans are by the windows that the layers have; 0: no window.

    Args:
        tp_mesh: this rank's tensor-parallel peers; None if it has none.

    Attributes:
        step_tokens: of all ranks, a scalar; set before each step.
    """

    def __init__(self, tp_mesh: DeviceMesh | None = None) -> None:
        self.tp_mesh = tp_mesh
        self.step_tokens: Tensor | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plans: dict[int, Plan],
        window: int,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention of a layer with this window; the other arguments as of `attend`."""
        return attention.attend(q, k, v, plans[window], scale=scale, sinks=sinks, softcap=softcap)

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        plans: dict[int, Plan],
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """As `attention.causal_conv`."""
        return attention.causal_conv(x, weight, plans[0], bias, activation)

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        plans: dict[int, Plan],
        *,
        qk_l2norm: bool = False,
    ) -> Tensor:
        """As `attention.gated_delta_rule`."""
        return attention.gated_delta_rule(q, k, v, g, beta, plans[0], qk_l2norm=qk_l2norm)

    def selective_scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, plans: dict[int, Plan]) -> Tensor:
        """As `attention.selective_scan`."""
        return attention.selective_scan(x, dt, A, B, C, plans[0])

    def sum_ranks(self, x: Tensor, plans: dict[int, Plan]) -> Tensor:
        """Sum over the ranks that share each sequence by context and tensor parallelism."""
        total = attention.sum_ranks(x, next(iter(plans.values())))
        if self.tp_mesh:
            dist.all_reduce(total, group=self.tp_mesh.get_group())
        return total

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        """Return `hidden` unchanged; backward also differentiates `loss_sum`, a scalar, over the tokens of the step."""
        return add_loss(hidden, loss_sum, self.step_tokens)


class StepSums(NamedTuple):
    """Sums over a step's forwards on this rank, scalars.

    Attributes:
        loss: weighted sum of the losses of the tokens that this rank counts.
        divisor: what the loss is divided by, over all ranks; see training.loss_normalization.
        learned_tokens: over all ranks.
        largest_logit: of this rank's rows of the vocabulary; minus infinity on ranks without the last part.
    """

    loss: Tensor
    divisor: Tensor
    learned_tokens: Tensor
    largest_logit: Tensor


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's parameters in place, as FSDP does. Bytes and buffers (frequencies, router biases) stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def set_rope(model: LanguageModel, args: ModelArgs, rope: Rope | None, seq_len: int, device: torch.device) -> None:
    """Set the rotary embedding of a stage with sequences of `seq_len` tokens; None: the model's own, or the default."""
    reset_rope = getattr(model, "reset_rope", None)
    if rope is None and reset_rope:
        reset_rope(seq_len, device)
    else:
        model.set_rope(*rope_frequencies(rope or Rope(), args.rotary_dim, seq_len), device)


class Parts(nn.ModuleList):
    """A rank's parts of the model, in order of their layers."""

    def __iter__(self) -> Iterator[LanguageModel]:
        return cast(Iterator[LanguageModel], super().__iter__())


class ParallelModel:
    """This rank's parts of the model: all of it, or its pipeline stages. Collective to make.

    Args:
        run: its model_args have the vocabulary set; the pipeline is split by the layers' cost in the longest stage.
        world: this process among the ranks.
        meshes: groups of ranks by axis; those of another CP degree are made when a stage begins.
        stage: the stage of the curriculum whose tp, pp and activation settings the parts are made with.

    Attributes:
        parts: modules, in order of their layers.
        optimizers: one for each part.
        parameter_count, parameter_names: of the whole model without adapters.
        lora_counts: what [lora] trains; None without it.
        trained_names: of all parameters of the whole model that are trained; with [lora] adapters are among them.
        pipeline: None without pipeline parallelism.
        token_loss: the loss of the last part.
        routing: adds up what this rank's routers choose; empty without experts.
        cp: context-parallel degree of the current stage.
        observe: called with each micro-batch of a step and the losses of its tokens, on ranks with the last part.
        watches: stopwatches by name; see `pop_timings`.
        coordinate: this rank's indices along pp, dp and cp in the current stage. Tensor-parallel peers share them, and
            so draw the same random numbers.
    """

    def __init__(self, run: ResolvedRun, world: World, meshes: Meshes, stage: ResolvedStage) -> None:
        config, args = run.config, run.model_args
        self.config, self.world, self.meshes, self.args = config, world, meshes, args
        self.device = world.device.device
        self.compute_dtype = getattr(torch, config.training.compute_dtype)
        self.activation = stage.activation
        settings, mesh = config.parallel, meshes.pp
        self.layers = plan_pipeline(settings, mesh.size(), layer_costs(args, run.longest))
        sharding = registry.architecture(config.model).sharding
        self.parts = Parts()
        self.attend = LayerAttention(meshes.tp)
        self.routing = RoutingSums(args.n_layers, args.n_experts, self.device)
        experts = meshes.experts if settings.ep > 1 else None
        for number in self.layers.of_rank(mesh.get_local_rank()):
            part = registry.empty_model(config.model, args, self.attend)
            whole = {name: parameter.numel() for name, parameter in part.named_parameters()}
            self.trained_names = registry.trained_names(part, config.lora)
            self.lora_counts = registry.lora_counts(part, args, config.lora) if config.lora else None
            if config.lora:  # while all names are there: a pattern for a tied output names the first part's embedding
                freeze_base(part, config.lora)
            part.keep_layers(*self.layers.layers[number])
            parallelize(part, meshes, sharding, run.config_of(stage))
            dispatch_experts(part, self.routing, experts[0].get_group() if experts else None)
            self.parts.append(part)
        self.parameter_count, self.parameter_names = sum(whole.values()), list(whole)
        check_rules(config.optimizer.groups, self.trained_names)
        if config.lora and mesh.size() > 1:
            check_pipeline_targets(self.trained_names, self.layers.layers)
        self.reset_optimizers()
        chunk, z_loss = config.training.loss_chunk_tokens, config.training.z_loss
        assert chunk, "resolve_run decides it"
        self.compiled = bool(config.compile.enable)
        self.token_loss = ChunkedCrossEntropy(
            chunk, z_loss, args.logit_scale, args.logit_softcap, compiled=self.compiled
        )
        self.observe: Callable[[MicroBatch, Tensor], None] | None = None
        self.watches = {name: Stopwatch(self.device) for name in WATCHED}
        attention.watch_messages(self.watches["cp_wait"].running, self.watches["cp_flight"].running)
        self.pipeline: Pipeline[MicroBatch] | None = None
        if mesh.size() > 1:
            tied = args.tie_embeddings
            self.pipeline = Pipeline(list(self.parts), self.layers, mesh, settings.pp_schedule, self.device, tied=tied)
            self.watches |= self.pipeline.watches
        self.norm_groups = self._group_parameters()

    def reset_optimizers(self) -> None:
        """Make new optimizers, whose state is empty."""
        settings, dtype = self.config.optimizer, self.compute_dtype
        self.optimizers = [build_optimizer(part, settings, compute_dtype=dtype) for part in self.parts]

    def configure_stage(self, stage: ResolvedStage) -> BatchLayout:
        """Set what the stage changes: process groups, RoPE frequencies, activation checkpointing. Collective.

        Returns:
            which sequences of its steps this rank reads.
        """
        if stage.activation != self.activation:
            self.activation = stage.activation
            for part in self.parts:
                wrap_blocks(part, self.activation, self.config.compile, self.device.type, self.config.parallel.ep)
        settings, self.cp = self.config.context_parallel, stage.cp
        self.coordinate = self.meshes.coordinate(self.world.rank, self.cp)
        hybrid, linear = "hybrid" in stage.strategies.values(), any(mixer.state_channels for mixer in self.args.mixers)
        whole_mesh = self.meshes.for_cp(stage.cp) if linear or not hybrid else None
        cp_mesh = self.meshes.for_hybrid(stage.cp, stage.all_to_all_ranks) if hybrid else whole_mesh
        assert cp_mesh is not None
        names = (stage.strategies[0], settings.kernel, settings.layout, settings.kv_transfer)
        node = max(1, self.world.ranks_per_node // stage.tp)
        row_pairs = assumed_pairs_per_row(self.args.n_heads, self.args.n_kv_heads)
        context_parallel = ContextParallel(cp_mesh, *names, node, row_pairs, whole_mesh if hybrid else None)
        self._log_choices(stage)
        for part in self.parts:
            set_rope(part, self.args, stage.rope, stage.seq_len, self.device)
        return BatchLayout(
            stage.seq_len,
            stage.micro_batches,
            stage.micro_batch_sequences,
            stage.dp,
            self.coordinate[1],
            context_parallel.make_plan,
            stage.strategies,
            self.config.training.loss_normalization == "conversation",
        )

    def _log_choices(self, stage: ResolvedStage) -> None:
        """Log what `auto` chose for the layers with each window, and why."""
        if stage.strategy == "auto" and stage.cp > 1 and self.config.context_parallel.kv_transfer == "exact":
            for window, (query, key) in layer_heads(self.args).items():
                heads, band = (query // stage.tp, key // stage.tp), AttentionMask().windowed(window).band
                log_choice(stage.strategies[window], *heads, stage.cp, band)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run blocks and loss without torch.compile, since hooks inside compiled blocks would not run."""
        compiled_losses, self.token_loss.compiled_losses = self.token_loss.compiled_losses, None
        try:
            with ExitStack() as blocks:
                for part in self.parts if self.compiled else ():
                    blocks.enter_context(uncompiled_blocks(part, self.activation, self.device.type))
                yield
        finally:
            self.token_loss.compiled_losses = compiled_losses

    def forward_backward(self, micro_batches: tuple[MicroBatch, ...]) -> StepSums:
        """Forward and backward of a step, whose loss `training/step_loss.py` describes."""
        counted = micro_batches if self.meshes.owns_tokens else ()
        counts = count_step(counted, self.config.training.loss_normalization, self.device)
        self.attend.step_tokens = counts.tokens
        loss_sum = torch.zeros((), device=self.device)
        self.token_loss.largest_logit = torch.full((), -torch.inf, device=self.device)
        train_part = partial(self._train_part, counts.divisor, loss_sum)
        if self.pipeline:
            self.pipeline.train_step(micro_batches, self._hidden(micro_batches[0]), train_part)
        else:
            for number, batch in enumerate(micro_batches, 1):
                self._prepare_fsdp(is_last=number == len(micro_batches))
                with self.watches["forward"].running():
                    loss = train_part(self.parts[0], None, batch)
                with self.watches["backward"].running():
                    loss.backward()
        sums = loss_sum * self.meshes.owns_loss, counts.divisor, counts.learned_tokens, self.token_loss.largest_logit
        return StepSums(*sums)

    def _prepare_fsdp(self, *, is_last: bool) -> None:
        """Have FSDP do in a micro-batch what it must; what can wait, it does in the last one of a step.

        Every FSDP group has gradients in the last micro-batch too, so none keeps a sum for the next step.
        """
        model, degrees = cast(FSDPModule, self.parts[0]), self.meshes.degrees
        if self.config.sync_once_per_step:
            if degrees.fsdp == degrees.tp == 1:  # whole gradients are no larger than the shards
                model.set_requires_gradient_sync(is_last)
            elif degrees.dp_replicate > 1:
                model.set_requires_all_reduce(is_last)
        if self.config.parallel.fsdp_reshard == "never":
            model.set_reshard_after_backward(is_last)

    def _train_part(
        self, divisor: Tensor, loss_sum: Tensor, forward: Forward, hidden: Tensor | None, batch: MicroBatch
    ) -> Tensor:
        """Forward of one part on a micro-batch of a step.

        Args:
            divisor: scalar of the whole step, by which the weighted sum of the losses of tokens is divided.
            loss_sum: the last part adds its losses to it, for the records.

        Returns:
            hidden states; from the last part a scalar to call backward on.
        """
        weights = None if batch.weights is None else self.world.device.move(batch.weights)
        head = LossHead(self.token_loss, self.world.device.move(batch.labels), weights, divisor)
        out = cast(Tensor, self._forward_part(forward, hidden, batch, head))
        if head.losses is not None:
            loss_sum.add_(head.weighted_sum())
            if self.observe:
                self.observe(batch, head.losses)
        return out

    @torch.no_grad()
    def forward(self, batch: MicroBatch, compute: Compute[Result]) -> Result | None:
        """The result of `compute`, such as `token_loss`, on a micro-batch; None on ranks without the last part.

        Collective.
        """
        measure_part = partial(self._measure_part, compute)
        if self.pipeline is None:
            return cast(Result, measure_part(self.parts[0], None, batch))
        return cast(Result | None, self.pipeline.evaluate(batch, self._hidden(batch), measure_part))

    def _measure_part(
        self, compute: Compute[Result], forward: Forward, hidden: Tensor | None, batch: MicroBatch
    ) -> Result | Tensor:
        """Forward of one part without a loss: hidden states; from the last part the result of `compute`."""
        labels = self.world.device.move(batch.labels)

        def head(hidden: Tensor, output: nn.Linear) -> Result:
            hidden, weight, vocabulary = output_rows(hidden, output)
            return compute(hidden, weight, labels, vocabulary)

        return cast(Result | Tensor, self._forward_part(forward, hidden, batch, head))

    def _forward_part(self, forward: Forward, hidden: Tensor | None, batch: MicroBatch, head: Head) -> object:
        """Call one part of the model on a micro-batch.

        Args:
            hidden: states of the previous part; None for the first part, which reads the tokens.
            head: ends the last part: (hidden states, output layer) -> result.
        """
        move = self.world.device.move
        return forward(move(batch.tokens) if hidden is None else hidden, move(batch.positions), batch.plans, head)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """An empty tensor like those that pipeline stages send each other, on the meta device."""
        sequences, length = batch.tokens.shape
        shape = (sequences, length // self.meshes.degrees.tp, self.args.dim)
        return torch.empty(shape, dtype=self.compute_dtype, device="meta")

    def update(self, lr: float, grad_norm: float, routing: Routing | None = None) -> None:
        """Clip the gradients, run the optimizers, free the gradients, and balance the routers that have biases.

        Args:
            grad_norm: global norm of the gradients.
            routing: of the step's tokens to experts.
        """
        with self.watches["optimizer"].running():
            for optimizer in self.optimizers:
                set_learning_rates(optimizer, lr)
                step_clipped(optimizer, grad_norm, self.config.training.max_grad_norm)
            self.zero_grad()
        rate = self.config.training.router_bias_update
        if routing and rate:
            for part in self.parts:
                update_router_biases(part.router_biases, routing.counts, rate)

    def pop_timings(self) -> dict[str, float]:
        """Seconds since the last call, by name.

        `forward`, `backward` and `optimizer`; within them `cp_wait`, spent waiting for context-parallel messages, and
        `cp_flight`, from posting a message until it has arrived; with a pipeline also `pipeline`, its whole steps.
        """
        return {name: watch.take() for name, watch in self.watches.items()}

    @torch.no_grad()
    def memory_by_kind(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients (which exist from backward to update) and optimizer state."""
        weights = sum(local_tensor(parameter).nbytes for parameter in self.parts.parameters())
        trained = (parameter for parameter in self.parts.parameters() if parameter.requires_grad)
        gradients = sum(local_tensor(parameter).nbytes for parameter in trained)
        kept = sum(local_tensor(state).nbytes for state in self.state_tensors())
        return {"weights": weights, "gradients": gradients, "optimizer": kept}

    def state_tensors(self) -> Iterator[Tensor]:
        """Tensors of this rank's optimizer state."""
        values = (x for optimizer in self.optimizers for state in optimizer.state.values() for x in state.values())
        return (x for x in values if isinstance(x, Tensor))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def square_norms(self) -> Tensor:
        """This rank's share of the squared gradient norms of each block and of all other parameters, `[blocks + 1]`."""
        return square_norms(self.norm_groups, self.world.size // self.meshes.pp.size())

    def _group_parameters(self) -> list[list[nn.Parameter]]:
        """This rank's parameters by block, those outside blocks last; none is counted twice over the pipeline."""
        groups: list[list[nn.Parameter]] = [[] for _ in range(self.args.n_layers + 1)]
        layers = [layer for part in self.parts for layer in part.layers.items()]
        numbers = {parameter: int(number) for number, layer in layers for parameter in layer.parameters()}
        for _, parameter in self.pipeline.unique_parameters() if self.pipeline else self.parts[0].named_parameters():
            groups[numbers.get(parameter, -1)].append(parameter)
        return groups

    def flops_per_token(self, seq_len: int, keys: Sequence[float] | None = None) -> float:
        """FLOPs of training on one token; see `metrics.throughput.flops_per_token`."""
        counts = self.lora_counts
        if counts is None:
            return flops_per_token(self.args, seq_len, keys)
        changed = adapter_flops_per_token(self.args, counts.adapters, counts.whole_linear)
        return flops_per_token(self.args, seq_len, keys, changed, counts.forward_layers)

    def reads_same_batch_as(self, rank: int) -> bool:
        """Whether a rank reads the same tokens as this one: its peers in tp and pp do."""
        return self.meshes.coordinate(rank, self.cp)[1:] == self.coordinate[1:]

    def pipeline_summary(self, stage: ResolvedStage) -> str:
        """Schedule, layers and bubble of the pipeline, for the log; empty without one."""
        if self.pipeline is None:
            return ""
        bubble = bubble_fraction(self.config.parallel, self.pipeline.ranks, len(self.parts), stage.micro_batches)
        layers = ", ".join(f"{first} to {stop - 1}" for first, stop in self.layers.layers)
        return f"; pipeline {self.config.parallel.pp_schedule}, layers {layers}; {bubble:.0%} of a step is bubble"
