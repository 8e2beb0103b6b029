"""How many parameters a rank has, computed from ModelArgs; a test compares this with the model itself."""

from dataclasses import dataclass, replace

from torchtitan_cp.config import Config
from torchtitan_cp.config.contract import PlannedArgs
from torchtitan_cp.data.corpus.tokenizer import vocabulary_size
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import with_defaults


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model on one tensor-parallel rank.

    Attributes:
        block: parameters of one layer; the mean if layers differ.
        matrices: those of the layer's matrices, without norms, biases and sinks.
        active_matrices: those of the matrices that a token uses; it uses only some experts.
        experts: those of all experts of a layer.
        embedding: V E, and other parameters before the first layer.
        head: the last norm, and the output's V E if it is not tied to the embedding.
    """

    block: int
    matrices: int
    active_matrices: int
    experts: int
    embedding: int
    head: int

    def outer(self, is_first: bool, is_last: bool, tied: bool) -> int:
        """Parameters outside the layers, on a pipeline rank with the first layer (`is_first`) or last (`is_last`)."""
        embedding = self.embedding if is_first or (is_last and tied) else 0
        return embedding + (self.head if is_last else 0)


def count_parameters(args: PlannedArgs, tp: int = 1) -> Parameters:
    """Parameters of a model with `vocab_size` set, on one of `tp` ranks that share its matrices."""
    output = args.dim * args.vocab_size
    matrices, active = (
        (count - output) // args.n_layers // tp for count in (args.matrix_parameters(), args.linear_parameters())
    )
    experts = (matrices - active) * args.n_experts // max(1, args.n_experts - args.experts_per_token)
    output_rows = 0 if args.tie_embeddings else -(-args.vocab_size // tp)
    block, embedding = matrices + args.small_parameters(tp), args.embedding_parameters(tp)
    return Parameters(block, matrices, active, experts, embedding, (output_rows + 1) * args.dim)


def total_parameters(args: PlannedArgs) -> int:
    """All parameters of a model with `vocab_size` set."""
    counts = count_parameters(args)
    return args.n_layers * counts.block + counts.outer(True, True, args.tie_embeddings)


def sized_model_args(config: Config) -> PlannedArgs:
    """The config's ModelArgs with `vocab_size` set, from the model or the tokenizer, without preparing the corpus.

    Raises:
        UserError: an unknown flavor or override, or a tokenizer that cannot be read.
    """
    args = registry.model_args_of(config.model)
    return args if args.vocab_size else replace(args, vocab_size=vocabulary_size(with_defaults(config).tokenizer))
