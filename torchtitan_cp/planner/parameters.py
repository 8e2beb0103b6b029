"""What the planner reads off a model without weights: how many parameters a rank has, and how its norms compute."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor, nn

from torchtitan_cp.config import Config
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.data.corpus.tokenizer import vocabulary_size
from torchtitan_cp.metrics.throughput import adapter_flops_per_token
from torchtitan_cp.parallel.lora_targets import find_targets
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import with_defaults

# Roles of `parallel/tensor.py` under which a rank holds a part of a module's vectors, or of the rows of a vocabulary.
SPLIT_ROLES = ("column", "per_head", "embedding", "output")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model on one tensor-parallel rank, and what its modules say about its norms.

    Attributes:
        block: parameters of one layer; the mean if layers differ.
        matrices: those of the layer's matrices, without norms, biases and sinks.
        active_matrices: those of the matrices that a token uses; it uses only some experts.
        last_product: those of the matrix that multiplies last, if a recomputed layer does not repeat it; see ModelArgs.
        experts: those of all experts of a layer.
        embedding: V E, and other parameters outside the layers.
        head: the last norm, and the output's V E if it is not tied to the embedding.
        fused_norms: whether each norm is torch's RMSNorm, which a GPU runs as one kernel.
        qk_norm: whether queries and keys pass norms of torch's class or a subclass. Those of transformers' own classes
            are left out: dry runs are nearer to the formula without them.
        more_norms: norms of the width E in a layer beyond the usual two, as in Gemma, which also has them after its
            attention and its MLP; the mean if layers differ.
        halves: whether layers have halves, of which the first is compiled.
    """

    block: int
    matrices: int
    active_matrices: int
    last_product: int
    experts: int
    embedding: int
    head: int
    fused_norms: bool
    qk_norm: bool
    more_norms: float = 0.0
    halves: bool = False

    def outer(self, is_first: bool, is_last: bool, tied: bool) -> int:
        """Parameters outside the layers, on a pipeline rank with the first layer (`is_first`) or last (`is_last`)."""
        embedding = self.embedding if is_first or (is_last and tied) else 0
        return embedding + (self.head if is_last else 0)


@dataclass(frozen=True)
class TrainedParameters:
    """What [lora] trains on one tensor-parallel rank.

    Attributes:
        adapters: numbers in the adapters of one layer; the mean if layers differ.
        block: weights of one layer that are trained whole; active_block: those of them that a token uses.
        embedding, head: the same outside of the layers, as in Parameters.
        output: whether the output matrix is trained.
        repeated_product: of `Parameters.last_product`, weights that have an adapter or are in NF4.
        quantized: weights of one layer that are stored in NF4; the mean if layers differ.
        largest_quantized: weights of the largest such matrix.
        flops: what [lora] adds to the FLOPs of a token, on all ranks.
    """

    adapters: float
    block: float
    active_block: float
    embedding: int
    head: int
    output: bool
    repeated_product: float
    quantized: float
    largest_quantized: int
    flops: float

    def outer(self, is_first: bool, is_last: bool, tied: bool) -> int:
        """As of Parameters."""
        return (self.embedding if is_first or (is_last and tied) else 0) + (self.head if is_last else 0)


@lru_cache(maxsize=64)
def count_trained_parameters(architecture: str, args: ModelArgs, lora: Lora, tp: int = 1) -> TrainedParameters:
    """What [lora] trains of a model with `vocab_size` set, on one of `tp` ranks that share its matrices."""
    section = Model(architecture=architecture)
    model, roles = registry.empty_model(section, args), registry.architecture(section).sharding
    found, counts, layers = find_targets(model, lora), registry.lora_counts(model, args, lora), args.n_layers
    adapters = sum(_adapter_on_rank(model.get_submodule(name), name, lora.rank, roles, tp) for name in found.adapted)
    in_layers, experts = set(model.layers.parameters()), {p for m in model.experts.values() for p in m.parameters()}
    block, active, embedding, head = 0.0, 0.0, 0, 0
    for name in found.trained:
        parameter = model.get_parameter(name)
        module = name.rpartition(".")[0]
        matrix = parameter.dim() > 1 and "bias" not in name
        split = matrix and parameter in in_layers
        size = parameter.numel() // tp if split else _on_rank(_Tensors([_rows(parameter, module, roles)]), tp)
        if parameter in in_layers:
            block += size
            active += matrix * size * (args.experts_per_token / args.n_experts if parameter in experts else 1.0)
        elif (parameter is model.output.weight and not args.tie_embeddings) or parameter.dim() == 1:
            head += size
        else:
            embedding += size
    return TrainedParameters(
        adapters=adapters / layers,
        block=block / layers,
        active_block=active / layers,
        embedding=embedding,
        head=head,
        output=any(model.get_parameter(name) is model.output.weight for name in found.trained),
        repeated_product=_weights(model, {*args.last_products} & {*found.adapted, *found.quantized}) / layers / tp,
        quantized=counts.quantized / layers,
        largest_quantized=max((model.get_parameter(f"{name}.weight").numel() for name in found.quantized), default=0),
        flops=adapter_flops_per_token(args, counts.adapters, counts.whole_linear),
    )


def _weights(model: nn.Module, names: Iterable[str]) -> int:
    """Weights of these modules."""
    return sum(model.get_parameter(f"{name}.weight").numel() for name in names)


def _adapter_on_rank(layer: nn.Module, name: str, rank: int, roles: Mapping[str, str], tp: int) -> int:
    """Numbers in the adapter of a linear layer, whose B or A tensor-parallel ranks share as they share the layer."""
    assert isinstance(layer, nn.Linear)
    role = next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), "")
    rows, columns = layer.weight.shape
    return rank * (rows // (tp if role == "column" else 1) + columns // (tp if role == "row" else 1))


def count_parameters(model: Model, args: ModelArgs, tp: int = 1) -> Parameters:
    """Parameters of a model with `vocab_size` set, on one of `tp` ranks that share its matrices.

    The model is built on the meta device, once for the same architecture and args.
    """
    return _count(model.architecture, args, tp)


@lru_cache(maxsize=64)  # a search asks once per estimate
def _count(architecture: str, args: ModelArgs, tp: int) -> Parameters:
    found, layers = _read_model(architecture, args), args.n_layers
    unused = found.experts - found.experts * args.experts_per_token // max(1, args.n_experts)
    output = 0 if args.tie_embeddings else _on_rank(found.output, tp)
    return Parameters(
        block=found.matrices // layers // tp + _on_rank(found.vectors, tp) // layers,
        matrices=found.matrices // layers // tp,
        active_matrices=(found.matrices - unused) // layers // tp,
        last_product=found.last_products // layers // tp,
        experts=found.experts // layers // tp,
        embedding=_on_rank(found.outside, tp) - output - args.dim,
        head=output + args.dim,
        fused_norms=found.fused_norms,
        qk_norm=found.qk_norm,
        more_norms=max(0.0, found.norms / layers - 2),
        halves=found.halves,
    )


_Tensors = Counter[tuple[int, int, bool]]
"""(rows, numbers in a row, whether tensor-parallel ranks share the rows) -> how many tensors are like that."""


def _on_rank(tensors: _Tensors, tp: int) -> int:
    """Numbers in these tensors on one of `tp` ranks."""
    return sum(
        count * (-(-rows // tp) if is_split else rows) * columns for (rows, columns, is_split), count in tensors.items()
    )


class _ModelCounts(NamedTuple):
    """What the modules of a whole model show.

    Attributes:
        matrices: parameters in the matrices of all layers; experts: those of experts among them; last_products: those
            of each layer's last product.
        vectors: the other tensors of all layers.
        outside: tensors outside the layers; output: the output layer's.
        fused_norms, qk_norm, halves: see Parameters; norms: of the width E in all layers.
    """

    matrices: int
    experts: int
    last_products: int
    vectors: _Tensors
    outside: _Tensors
    output: _Tensors
    fused_norms: bool
    qk_norm: bool
    norms: int
    halves: bool


@lru_cache(maxsize=8)
def _read_model(architecture: str, args: ModelArgs) -> _ModelCounts:
    """Build the model on the meta device and count."""
    section = Model(architecture=architecture)
    model, roles = registry.empty_model(section, args), registry.architecture(section).sharding
    in_experts = {parameter for module in model.experts.values() for parameter in module.parameters()}
    in_layers, matrices, experts, vectors = set(model.layers.parameters()), 0, 0, _Tensors()
    modules = dict(model.layers.named_modules(prefix="layers"))
    for name, module in modules.items():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and "bias" not in leaf and not isinstance(module, nn.Embedding):
                matrices += parameter.numel()
                experts += parameter.numel() if parameter in in_experts else 0
            else:
                vectors[_rows(parameter, name, roles)] += 1
    norms = {name: module for name, module in modules.items() if "Norm" in type(module).__name__}
    outside = (item for item in model.named_parameters() if item[1] not in in_layers)
    return _ModelCounts(
        matrices=matrices,
        experts=experts,
        last_products=_weights(model, filter(None, args.last_products)),
        vectors=vectors,
        outside=_Tensors(_rows(parameter, name.rpartition(".")[0], roles) for name, parameter in outside),
        output=_Tensors([_rows(model.output.weight, "output", roles)]),
        fused_norms=all(type(norm).forward is nn.RMSNorm.forward for norm in norms.values()),
        qk_norm=any(isinstance(norm, nn.RMSNorm) and name.endswith("q_norm") for name, norm in norms.items()),
        norms=sum(any(w.numel() == args.dim for w in norm.parameters(recurse=False)) for norm in norms.values()),
        halves=any(hasattr(layer, "attention_half") for layer in model.layers.values()),
    )


def _rows(parameter: Tensor, module: str, roles: Mapping[str, str]) -> tuple[int, int, bool]:
    """A tensor as a key of _Tensors."""
    of_module = [role for pattern, role in roles.items() if fnmatchcase(module, pattern)]
    return len(parameter), parameter.numel() // len(parameter), bool(of_module) and of_module[-1] in SPLIT_ROLES


def total_parameters(model: Model, args: ModelArgs) -> int:
    """All parameters of a model with `vocab_size` set."""
    counts = count_parameters(model, args)
    return args.n_layers * counts.block + counts.outer(True, True, args.tie_embeddings)


def sized_model_args(config: Config) -> ModelArgs:
    """The config's ModelArgs with `vocab_size` set, from the model or the tokenizer, without preparing the corpus.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    args = registry.model_args_of(config.model)
    return args if args.vocab_size else replace(args, vocab_size=vocabulary_size(with_defaults(config).tokenizer))
