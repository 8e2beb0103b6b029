"""The model on this rank: its parts, sharded and filled, their optimizers, and what a stage of the curriculum sets."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp import registry
from torchtitan_cp.attention import ContextParallel, Plan, attend, choose_strategy, sum_ranks
from torchtitan_cp.config import Config
from torchtitan_cp.curriculum import StagePlan, rope_frequencies
from torchtitan_cp.data.loader import MicroBatch, StepShape
from torchtitan_cp.metrics import layer_costs
from torchtitan_cp.optimizer import (
    IGNORED,
    VocabularyShard,
    build_optimizer,
    chunked_cross_entropy,
    scale_gradients,
    set_learning_rates,
)
from torchtitan_cp.parallel import (
    Hidden,
    Meshes,
    Pipeline,
    World,
    bubble_share,
    parallelize,
    plan_stages,
    vocabulary_part,
    wrap_blocks,
)


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


class Network:
    """This rank's parts of the model: all of it, or its stages of the pipeline. Collective to make.

    Args:
        config: of the run.
        world: this process among the ranks.
        meshes: of the run.
        shape: sizes of the model.
        begins: the stage whose tp, pp and activation the parts are made with.
        longest: tokens of the longest stage's sequences; the pipeline is split by what layers cost there.

    Attributes:
        parts: modules, in order of their layers.
        optimizers: of each part.
        pipeline: None on one pipeline rank.
        role: this rank's place in pp, dp and cp of the stage entered; tensor-parallel peers share it, as they share
            what they compute and so their random numbers.
    """

    def __init__(
        self, config: Config, world: World, meshes: Meshes, shape: Any, begins: StagePlan, longest: int
    ) -> None:
        self.config, self.world, self.meshes, self.shape = config, world, meshes, shape
        self.device = world.device.device
        self.compute_dtype = getattr(torch, config.training.compute_dtype)
        self.activation = begins.activation
        settings, mesh = config.parallel, meshes.pp
        self.layers = plan_stages(settings, mesh.size(), layer_costs(shape, longest))
        architecture = registry.architecture(config.model)
        begun_with = dataclasses.replace(config, activation=begins.activation)
        self.parts = nn.ModuleList()
        for number in self.layers.of(mesh.get_local_rank()):
            with torch.device("meta"):
                part = architecture.build(shape, LayerAttention())
                whole = {name: parameter.numel() for name, parameter in part.named_parameters()}
                part.keep(*self.layers.layers[number])  # type: ignore[operator]
            parallelize(part, meshes, architecture.sharding, begun_with)
            self.parts.append(part)
        self.parameter_count, self.parameter_names = sum(whole.values()), list(whole)
        self.reset_optimizers()
        self.pipeline = None
        if mesh.size() > 1:
            tied = shape.tie_embeddings
            self.pipeline = Pipeline(list(self.parts), self.layers, mesh, settings.pp_schedule, self.device, tied=tied)

    def reset_optimizers(self) -> None:
        """Optimizers without any state."""
        self.optimizers = [
            build_optimizer(part, self.config.optimizer, compute_dtype=self.compute_dtype, names=self.parameter_names)
            for part in self.parts
        ]

    def enter(self, stage: StagePlan) -> StepShape:
        """Make the stage's groups and frequencies, and its policy of what is kept. Collective.

        Returns:
            how its steps are dealt out.
        """
        if stage.activation != self.activation:
            self.activation = stage.activation
            for part in self.parts:
                wrap_blocks(part, stage.activation, self.config.compile, self.device.type)
        mesh, settings = self.meshes.for_cp(stage.cp), self.config.context_parallel
        self.role = tuple(mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp"))
        hybrid = stage.strategy == "hybrid"
        cp_mesh = self.meshes.for_hybrid(stage.cp, stage.all_to_all_ranks) if hybrid else mesh["cp"]
        context_parallel = ContextParallel(
            cp_mesh, stage.strategy, settings.kernel, settings.layout, settings.kv_transfer
        )
        frequencies, factor = rope_frequencies(stage.rope, self.shape.head_dim, stage.seq_len)
        for part in self.parts:
            part.set_rope(frequencies, factor, self.device)  # type: ignore[operator]
        return StepShape(
            stage.seq_len,
            stage.micro_batches,
            stage.micro_batch_sequences,
            stage.dp,
            mesh.get_local_rank("dp"),
            context_parallel.planner(),
            tuple(sorted({0, *self.shape.windows})),
        )

    def gradients(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[Tensor, Tensor]:
        """Forward and backward of a step. The loss is divided once, by the tokens of all ranks.

        Returns:
            (summed loss of the tokens that this rank counts, unmasked tokens over all ranks), scalars.
        """
        tokens = self.count_tokens(micro_batches)
        loss_sum = torch.zeros((), device=self.device)

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
                self._backward(run(self.parts[0], None, batch))
        return loss_sum * self.meshes.counts_losses, tokens

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def token_losses(self, batch: MicroBatch) -> Tensor | None:
        """Loss of each token, `[B, S/cp]` fp32, 0 where ignored; None on a rank without the last part. Collective."""
        if self.pipeline:
            result = self.pipeline.evaluate(batch, self._hidden(batch), self._forward)
        else:
            result = self._forward(self.parts[0], None, batch)
        return None if result is None else result[1]

    def count_tokens(self, micro_batches: tuple[MicroBatch, ...]) -> Tensor:
        """Unmasked tokens of the step over every rank, at least 1."""
        count = sum(int((batch.labels != IGNORED).sum()) for batch in micro_batches)
        tokens = torch.tensor(count if self.meshes.counts_tokens else 0, dtype=torch.int64, device=self.device)
        dist.all_reduce(tokens)
        return tokens.clamp_min(1)

    def _forward(self, forward: Callable[..., Any], state: Tensor | None, batch: MicroBatch) -> Any:
        """A part's forward on a micro-batch, from the hidden states before it or from the tokens.

        Returns:
            of the last part (sum to differentiate, loss of each token `[B, S/cp]`), else hidden states.
        """
        move = self.world.device.move
        tokens, labels, positions = (move(x) for x in (batch.tokens, batch.labels, batch.positions))
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

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, let the optimizers run, and forget the gradients.

        Args:
            grad_norm: global norm of the gradients.
        """
        scale_gradients(self.parts.parameters(), grad_norm, self.config.training.max_grad_norm)
        for optimizer in self.optimizers:
            set_learning_rates(optimizer, lr)
            optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def exchange_of(self, shape: StepShape) -> str:
        """The strategy, and for `auto` what it came to."""
        plan, tp = shape.plans()[0], self.meshes.degrees.tp
        heads = (self.shape.n_heads // tp, self.shape.n_kv_heads // tp)
        return plan.strategy if plan.strategy != "auto" else choose_strategy(*heads, plan.ranks, plan.mask.band)

    def describe_pipeline(self, stage: StagePlan) -> str:
        """Its schedule, layers and bubble in words; empty without one."""
        if self.pipeline is None:
            return ""
        settings = self.config.parallel
        bubble = bubble_share(settings, self.pipeline.ranks, len(self.parts), stage.micro_batches)
        layers = ", ".join(f"{first} to {stop - 1}" for first, stop in self.layers.layers)
        return f"; pipeline {settings.pp_schedule}, layers {layers}; {bubble:.0%} of a step is bubble"
