"""Shapes of the Llama family by name. Source: the config.json of each released checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama network.

    Attributes:
        dim: E, width of the residual stream.
        n_layers: blocks.
        n_heads: query heads, Hq; a multiple of n_kv_heads.
        n_kv_heads: key/value heads, Hkv.
        head_dim: D.
        ffn_dim: width of the SwiGLU.
        vocab_size: V; 0 takes the tokenizer's.
        tie_embeddings: the output matrix is the embedding.
        norm_eps: added to the mean square in RMSNorm.
        windows: keys that a query sees, itself counted, in the layers in turn; 0 is all of them.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int = 0
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    windows: tuple[int, ...] = (0,)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer, 0 for none."""
        return tuple(self.windows[number % len(self.windows)] for number in range(self.n_layers))

    def linear_parameters(self) -> int:
        """Weights that multiply each token once: blocks and output, without the embedding look-up."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.dim * self.ffn_dim) + self.dim * self.vocab_size

    def problem(self) -> str | None:
        """Why these sizes make no network, or None."""
        sizes = (self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim, self.ffn_dim)
        if min(sizes) < 1:
            return "every size must be at least 1"
        if not self.windows or min(self.windows) < 0:
            return f"windows = {list(self.windows)} must be one or more numbers from 0 (no window)"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}"
        return f"head_dim = {self.head_dim} is odd, and RoPE turns pairs" if self.head_dim % 2 else None


FLAVORS = {
    "debug": LlamaShape(192, 4, 6, 2, 32, 512, tie_embeddings=True),
    "60M": LlamaShape(512, 8, 8, 4, 64, 1408, tie_embeddings=True),
    "1B": LlamaShape(2048, 16, 32, 8, 64, 8192, 128256, tie_embeddings=True),
    "3B": LlamaShape(3072, 28, 24, 8, 128, 8192, 128256, tie_embeddings=True),
    "8B": LlamaShape(4096, 32, 32, 8, 128, 14336, 128256),
    "70B": LlamaShape(8192, 80, 64, 8, 128, 28672, 128256),
    "405B": LlamaShape(16384, 126, 128, 8, 128, 53248, 128256),
}
