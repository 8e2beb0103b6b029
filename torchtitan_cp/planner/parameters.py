"""How many parameters a rank has, from a shape's sizes; a test counts those of the real network."""

from dataclasses import dataclass
from typing import Any

from torchtitan_cp.config import Config
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer, trains_tokenizer


@dataclass(frozen=True)
class Parameters:
    """Parameters of a network, or of a part of it on one tensor-parallel rank.

    Attributes:
        block_matrices: of one layer; block_norms: its norms, biases and sinks.
        muon: of block_matrices, those that are matrices by themselves, as experts in one tensor are not.
        token_matrices: of block_matrices, those that a token meets: of experts, only some.
        embedding: V E; output: V E, 0 where it is tied to the embedding.
        last_norm: E.
    """

    block_matrices: int
    block_norms: int
    muon: int
    token_matrices: int
    embedding: int
    output: int
    last_norm: int

    @property
    def block(self) -> int:
        """Of one layer."""
        return self.block_matrices + self.block_norms

    def ends(self, opens: bool, closes: bool, tied: bool) -> int:
        """Outside the layers, on a pipeline rank that has the first layer (`opens`) or the last (`closes`)."""
        embedding = self.embedding if opens or (closes and tied) else 0
        return embedding + (self.output + self.last_norm if closes else 0)


def count_parameters(shape: Any, tp: int = 1) -> Parameters:
    """Parameters of a shape with `vocab_size` set, on one of `tp` ranks that share its matrices."""
    vocabulary = -(-shape.vocab_size // tp) * shape.dim
    output = shape.dim * shape.vocab_size
    matrices, met = (
        (count - output) // shape.n_layers // tp for count in (shape.matrix_parameters(), shape.linear_parameters())
    )
    small = 2 * shape.dim + 2 * shape.head_dim * shape.qk_norm
    small += (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim // tp * shape.qkv_bias
    small += shape.n_heads // tp * shape.sinks
    # Experts lie in one tensor of three dims.
    alone = met - 3 * shape.dim * shape.token_ffn_dim // tp if shape.token_copies else matrices
    return Parameters(matrices, small, alone, met, vocabulary, 0 if shape.tie_embeddings else vocabulary, shape.dim)


def total_parameters(shape: Any) -> int:
    """All parameters of a shape with `vocab_size` set."""
    counts = count_parameters(shape)
    return shape.n_layers * counts.block + counts.ends(True, True, shape.tie_embeddings)


def vocabulary_of(config: Config, shape: Any) -> int:
    """V without preparing the corpus: the shape's, or the tokenizer's.

    Raises:
        DataError: the shape takes the tokenizer's, and the tokenizer's file cannot be read.
    """
    if shape.vocab_size:
        return shape.vocab_size
    settings = config.tokenizer
    return settings.vocab_size if trains_tokenizer(settings) else load_tokenizer(settings).vocab_size
