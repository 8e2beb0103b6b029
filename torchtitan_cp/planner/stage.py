"""A stage of a run on a cluster: everything that its memory and time depend on."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.kernels import Case, choose_for_case
from torchtitan_cp.config import Config
from torchtitan_cp.config.contract import Mixer, ModelArgs
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.metrics.throughput import layer_costs
from torchtitan_cp.parallel.nf4 import WEIGHT_BYTES
from torchtitan_cp.parallel.pipeline_stages import PipelineStages, plan_pipeline
from torchtitan_cp.planner.devices import Cluster
from torchtitan_cp.planner.parameters import (
    Parameters,
    TrainedParameters,
    count_parameters,
    count_trained_parameters,
)
from torchtitan_cp.planner.strategy_costs import Heads, LayerCost, Rates, busiest_layer

MASKING_KEYS = ("document_mask", "short_share", "growth_from")  # keys of a stage's data that allow fewer pairs


class CompiledParts(NamedTuple):
    """Which parts of a layer are compiled; see parallel.blocks.wrap_blocks.

    Attributes:
        attention: the first half; mlp: all of the second; gate: in it, what lies between the products of experts.
    """

    attention: bool
    mlp: bool
    gate: bool

    @property
    def halves(self) -> bool:
        """Whether the layer is recomputed in two halves, and so keeps what passes between them."""
        return self.attention and not self.mlp


@dataclass(frozen=True)
class PlannedRank:
    """The part of a model on a pipeline rank; its tensor-parallel ranks share it.

    Attributes:
        layers: number of layers.
        windows: windows of the layers that attend to keys, 0 for none; the other layers only have a recurrent state.
        pipeline_stages: number of pipeline stages.
        kept_layers: layers times the micro-batches whose activations are held at once.
        is_first, is_last: whether it has the embedding before the first layer, and the output layer.
        outer_parameters: of embedding, last norm and output, before FSDP shards them.
        trained: numbers that are trained, adapters among them; frozen: parameters that are not.
    """

    layers: int
    windows: tuple[int, ...]
    pipeline_stages: int
    kept_layers: float
    is_first: bool
    is_last: bool
    outer_parameters: int
    trained: float
    frozen: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage on all ranks of a cluster.

    Attributes:
        config: with the stage's tp, pp and activation settings.
        args: ModelArgs with `vocab_size` set.
        mask: of its sequences; attention is estimated with it.
    """

    config: Config
    args: ModelArgs
    stage: ResolvedStage
    cluster: Cluster
    mask: AttentionMask = field(default_factory=AttentionMask)

    @property
    def degrees(self) -> Degrees:
        """Of the mesh in this stage."""
        return self.stage.degrees

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on a rank, B S/cp."""
        return self.stage.micro_batch_sequences * self.stage.seq_len // self.stage.cp

    @property
    def element_bytes(self) -> int:
        return int(getattr(torch, self.config.training.compute_dtype).itemsize)

    @property
    def reduce_bytes(self) -> int:
        return int(getattr(torch, self.config.training.reduce_dtype).itemsize)

    @property
    def fused_norm(self) -> bool:
        """See devices.Accelerator; the compiler fuses norms too."""
        return (self.cluster.accelerator.fused_norm and self.counts.fused_norms) or self.compiled.mlp

    @cached_property
    def compiled(self) -> CompiledParts:
        """Of a layer; of one with experts where layers differ."""
        enabled, halves = bool(self.config.compile.enable), self.counts.halves
        shares_experts = self.args.n_experts > 0 and self.degrees.ep > 1
        whole = enabled and not halves and not shares_experts
        return CompiledParts(enabled and (halves or whole), whole, enabled)

    @cached_property
    def counts(self) -> Parameters:
        """Parameters of a tensor-parallel rank."""
        return count_parameters(self.config.model, self.args, self.degrees.tp)

    @cached_property
    def trained(self) -> TrainedParameters | None:
        """What [lora] trains on a tensor-parallel rank; None: all parameters."""
        lora = self.config.lora
        if lora is None:
            return None
        return count_trained_parameters(self.config.model.architecture, self.args, lora, self.degrees.tp)

    @property
    def trains_output(self) -> bool:
        """Whether the output matrix has a gradient."""
        return self.trained is None or self.trained.output

    @cached_property
    def gathered_block(self) -> float:
        """Parameters of a layer that a rank gathers: all but other ranks' experts, which tp does not split."""
        adapters = self.trained.adapters if self.trained else 0.0
        return self.counts.block + self.counts.experts * (self.degrees.tp / self.degrees.ep - 1) + adapters

    @property
    def quantized_block(self) -> float:
        """Weights of a layer that are stored in NF4."""
        return self.trained.quantized if self.trained else 0.0

    @property
    def gathered_block_bytes(self) -> float:
        """Bytes of a layer's gathered parameters: of the compute dtype, or as they are stored in NF4."""
        saved = self.quantized_block * (self.element_bytes - WEIGHT_BYTES)
        return self.gathered_block * self.element_bytes - saved

    @cached_property
    def reduced_block(self) -> float:
        """Parameters of a layer whose gradients a rank reduces."""
        return self.trained_block if self.trained else self.gathered_block

    @property
    def trained_block(self) -> float:
        """Numbers of a layer that are trained, adapters among them."""
        return self.trained.block + self.trained.adapters if self.trained else self.counts.block

    def trained_outer(self, pp_rank: PlannedRank) -> int:
        """Parameters outside the layers that are trained, on a pipeline rank."""
        ends = pp_rank.is_first, pp_rank.is_last, self.args.tie_embeddings
        return self.trained.outer(*ends) if self.trained else pp_rank.outer_parameters

    @property
    def unrepeated_product(self) -> float:
        """Weights of a layer's last product, which a recomputed layer does not run again.

        Uncompiled, it does if they are in NF4 or have an adapter, since these save tensors after the product.
        """
        repeated = self.trained.repeated_product if self.trained and not self.compiled.mlp else 0.0
        return self.counts.last_product - repeated

    @property
    def unrepeated_attention_product(self) -> float:
        """Weights of the attention's last product, which a half that is recomputed by itself does not run again."""
        heads = self.args.n_heads * self.args.head_dim / self.degrees.tp
        return heads * self.args.dim if self.compiled.halves else 0.0

    @cached_property
    def gathered_experts(self) -> float:
        """The experts among them, if FSDP gathers these separately: under tp or ep."""
        separate = self.degrees.tp > 1 or self.degrees.ep > 1
        return separate * self.counts.experts * self.degrees.tp / self.degrees.ep

    @cached_property
    def sent_to_experts(self) -> float:
        """Bytes of the rows, T K E, that a layer sends to experts for a micro-batch, also to itself; 0 without ep."""
        if self.degrees.ep == 1:
            return 0.0
        return self.tokens / self.degrees.tp * self.args.experts_per_token * self.args.dim * self.element_bytes

    @cached_property
    def expert_sends_per_micro_batch(self) -> float:
        """How often a micro-batch sends such rows: to experts and back, forward, backward and in recomputation."""
        mode, tiles = self.config.activation.checkpoint, self.config.activation.mlp_tiles
        # A recomputed block does not need the result of its last tile.
        again = 2 * (mode != "none") if tiles == 1 else 2 + 2 * (mode != "none") * (tiles - 1) / tiles
        return 4 + again

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of all-to-alls in a step, on the rank with most layers, including what stays on the rank."""
        layers = max(pp_rank.layers for pp_rank in self.ranks)
        return layers * self.stage.micro_batches * self.expert_sends_per_micro_batch * self.sent_to_experts

    @cached_property
    def ranks(self) -> tuple[PlannedRank, ...]:
        """The pipeline ranks; the longest stage decides how layers are split between them."""
        longest = max([self.stage.seq_len, *(other.seq_len for other in self.config.curriculum.stages)])
        pipeline = plan_pipeline(self.config.parallel, self.degrees.pp, layer_costs(self.args, longest))
        return tuple(self._rank(pipeline, rank) for rank in range(self.degrees.pp))

    def _rank(self, pipeline: PipelineStages, rank: int) -> PlannedRank:
        numbers, counts = pipeline.of_rank(rank), self.counts
        layers = [layer for number in numbers for layer in range(*pipeline.layers[number])]
        mixers = [self.args.mixers[layer] for layer in layers]
        windows = tuple(mixer.window for mixer in mixers if mixer.n_heads)
        kept = len(layers) * self._waiting_forwards(rank, len(numbers)) / len(numbers)
        is_first, is_last = 0 in numbers, len(pipeline.owner) - 1 in numbers
        outer = counts.outer(is_first, is_last, self.args.tie_embeddings)
        parameters = len(layers) * counts.block + outer
        trained, frozen = float(parameters), 0.0
        if lora := self.trained:
            whole = len(layers) * lora.block + lora.outer(is_first, is_last, self.args.tie_embeddings)
            trained, frozen = whole + len(layers) * lora.adapters, parameters - whole
        return PlannedRank(len(layers), windows, len(numbers), kept, is_first, is_last, outer, trained, frozen)

    def _waiting_forwards(self, rank: int, per_rank: int) -> int:
        """Most forwards of pipeline stages that wait for their backward on a rank. Source: Narayanan et al., 2021."""
        schedule, ranks = self.config.parallel.pp_schedule, self.degrees.pp
        everything = self.stage.micro_batches * per_rank
        if ranks == 1:
            return 1
        most = {"1f1b": ranks - rank, "zbv_zero_bubble": 2 * ranks}
        return min(most.get(schedule, (per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1), everything)

    @cached_property
    def strategy(self) -> str:
        """The exchange of layers without a window."""
        return self.layer_strategy(0)

    def layer_strategy(self, window: int) -> str:
        """The exchange of layers with this window; one as long as the sequence hides nothing."""
        return self.stage.strategies[window if window < self.stage.seq_len else 0]

    def all_to_all_ranks(self, strategy: str) -> int:
        """Ranks that trade heads under a strategy."""
        hybrid = self.config.context_parallel.all_to_all_ranks if self.stage.cp > 1 else 1
        return {"all_to_all": self.stage.cp, "hybrid": hybrid}.get(strategy, 1)

    def mixer(self, window: int) -> Mixer:
        """Sizes of the layers that attend within this window, or if there are none, of the widest layer."""
        layers = [mixer for mixer in self.args.mixers if mixer.n_heads and mixer.window == window]
        return layers[0] if layers else max(self.args.mixers, key=lambda mixer: mixer.width)

    @cached_property
    def recurrence(self) -> Mixer | None:
        """Sizes of the layer with the largest recurrent state; None: no layer has one."""
        largest = max(self.args.mixers, key=lambda mixer: mixer.state_size)
        return largest if largest.state_size else None

    @cached_property
    def heads(self) -> Heads:
        """Heads of a tensor-parallel rank, in the layers that have the most."""
        return self._heads(self.args.n_heads, self.args.n_kv_heads, self.args.head_dim)

    def _heads(self, query: int, key: int, dim: int) -> Heads:
        tp, float8 = self.degrees.tp, self.config.context_parallel.kv_transfer == "float8"
        return Heads(query // tp, key // tp, dim, self.element_bytes, float8)

    def kernel(self, window: int, *, backward: bool = False) -> str:
        """The attention kernel of layers with this window: the one that is set, or that `auto` chooses.

        Raises:
            PlanError: the one that is set cannot run them.
        """
        dim, capability = self.mixer(window).head_dim, self.cluster.accelerator.capability
        case = Case(
            "cuda" if capability else "cpu",
            getattr(torch, self.config.training.compute_dtype),
            dim,
            dim,
            dense=self.is_dense(window),
            capability=capability,
            deterministic=self.config.training.deterministic,
            backward=backward,
            planned=True,
        )
        return choose_for_case(self.config.context_parallel.kernel, case)

    def is_dense(self, window: int) -> bool:
        """Whether all tiles of layers with this window are full or causal."""
        return not 0 < window < self.stage.seq_len and not any(getattr(self.stage.data, key) for key in MASKING_KEYS)

    def attention_shares(self, window: int) -> tuple[float, float]:
        """Fractions of the peak that attention reaches in layers with this window, forward and backward."""
        dim, dense, accelerator = self.mixer(window).head_dim, self.is_dense(window), self.cluster.accelerator
        forward, _ = accelerator.attention(self.kernel(window), dim, dense)
        _, backward = accelerator.attention(self.kernel(window, backward=True), dim, dense)
        return forward, backward

    def rates(self, window: int) -> Rates:
        """Speed of the attention kernels in layers with this window."""
        shares = self.attention_shares(window)
        forward, backward = (self.cluster.rate(self.config.training.compute_dtype, share) for share in shares)
        return Rates(self.cluster, forward, backward, self.degrees.tp)

    def attention(self, strategy: str, window: int) -> LayerCost:
        """Attention of one layer with this window, for one sequence, on the rank that works most."""
        mixer = self.mixer(window)
        return busiest_layer(
            self.mask,
            window,
            self._heads(mixer.n_heads, mixer.n_kv_heads, mixer.head_dim),
            self.rates(window),
            seq_len=self.stage.seq_len,
            ranks=self.stage.cp,
            strategy=strategy,
            layout=self.config.context_parallel.layout,
            all_to_all_ranks=self.all_to_all_ranks(strategy),
        )
