"""Sizes of the Llama family by name.

Source: the config.json of each released checkpoint.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from models.architecture import Mixer

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class LlamaArgs:
    """Sizes of a Llama model, and the options in which its relatives differ.

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
        windows: keys that a query sees, itself included, for the layers in turn; 0: all.
        qkv_bias: the projections to q, k and v have a bias (Qwen2).
        qk_norm: q and k pass an RMSNorm over each head, before RoPE (Qwen3).
        sinks: each head has a learned logit that takes part in the softmax and adds no value (gpt-oss).
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
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    logit_scale: ClassVar[float] = 1.0  # a factor of the logits
    logit_softcap: ClassVar[float] = 0.0  # 0: none
    compile_conflict: ClassVar[str] = ""  # why blocks cannot be compiled; "": they can
    longest: ClassVar[int] = 0  # tokens that a sequence may have; 0: any number
    # MoeArgs has fields of these names, so they are no ClassVars.
    n_experts = 0  # experts of a layer
    experts_per_token = 0  # experts that a token is sent to

    def compile_checkpoint_conflict(self, ep: int) -> str:
        """See ModelArgs."""
        return ""

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Attention of each layer."""
        windows = (self.windows[number % len(self.windows)] for number in range(self.n_layers))
        sizes = (self.n_heads, self.n_kv_heads, self.head_dim, self.head_dim)
        return tuple(Mixer(*sizes, window) for window in windows)

    @property
    def last_products(self) -> tuple[str, ...]:
        """See ModelArgs."""
        return tuple(f"layers.{number}.feed_forward.w2" for number in range(self.n_layers))

    @property
    def rotary_dim(self) -> int:
        """Entries of a head that RoPE rotates."""
        return self.head_dim

    def rope_problem(self, kind: str) -> str | None:
        """Why a stage cannot have a `rope` of this kind, or None."""
        return None

    def linear_parameters(self) -> int:
        """Weights that multiply a token, in blocks and output layer; of experts only those that it is sent to."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        mlp = 3 * self.dim * self.active_ffn_dim + self.dim * self.n_experts
        return self.n_layers * (attention + mlp) + self.dim * self.vocab_size

    @property
    def active_ffn_dim(self) -> int:
        """Width of the MLP for one token."""
        return self.ffn_dim

    def problem(self) -> str | None:
        """Why these sizes are not a valid model, or None."""
        sizes = (self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim, self.ffn_dim)
        if min(sizes) < 1:
            return "every size must be at least 1"
        if self.vocab_size < 0 or self.norm_eps < 0:
            return "vocab_size and norm_eps must not be negative"
        if self.n_layers > MAX_LAYERS:
            return f"n_layers = {self.n_layers} is more than {MAX_LAYERS}"
        if not self.windows or min(self.windows) < 0:
            return f"windows = {list(self.windows)} must be one or more numbers from 0 (no window)"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}"
        return f"head_dim = {self.head_dim} is odd, and RoPE rotates pairs" if self.head_dim % 2 else None


_qwen2 = partial(LlamaArgs, norm_eps=1e-6, qkv_bias=True)
_qwen3 = partial(LlamaArgs, norm_eps=1e-6, qk_norm=True)
# E, layers, Hq, Hkv, D, SwiGLU, V. Names without a family are Llama 3 (3.1 and 3.2 in the sizes they have).
FLAVORS = {
    "debug": LlamaArgs(192, 4, 6, 2, 32, 512, tie_embeddings=True),
    "60M": LlamaArgs(512, 8, 8, 4, 64, 1408, tie_embeddings=True),
    "1B": LlamaArgs(2048, 16, 32, 8, 64, 8192, 128256, tie_embeddings=True),
    "3B": LlamaArgs(3072, 28, 24, 8, 128, 8192, 128256, tie_embeddings=True),
    "8B": LlamaArgs(4096, 32, 32, 8, 128, 14336, 128256),
    "70B": LlamaArgs(8192, 80, 64, 8, 128, 28672, 128256),
    "405B": LlamaArgs(16384, 126, 128, 8, 128, 53248, 128256),
    "llama2-7B": LlamaArgs(4096, 32, 32, 32, 128, 11008, 32000),
    "llama2-13B": LlamaArgs(5120, 40, 40, 40, 128, 13824, 32000),
    "llama2-70B": LlamaArgs(8192, 80, 64, 8, 128, 28672, 32000),
    "mistral-7B": LlamaArgs(4096, 32, 32, 8, 128, 14336, 32000, windows=(4096,)),
    "mistral-7B-v0.3": LlamaArgs(4096, 32, 32, 8, 128, 14336, 32768),
    # Qwen2 and Qwen2.5 have the same sizes, except 3B, 14B and 32B, which only Qwen2.5 has.
    "qwen2-0.5B": _qwen2(896, 24, 14, 2, 64, 4864, 151936, tie_embeddings=True),
    "qwen2-1.5B": _qwen2(1536, 28, 12, 2, 128, 8960, 151936, tie_embeddings=True),
    "qwen2-3B": _qwen2(2048, 36, 16, 2, 128, 11008, 151936, tie_embeddings=True),
    "qwen2-7B": _qwen2(3584, 28, 28, 4, 128, 18944, 152064),
    "qwen2-14B": LlamaArgs(5120, 48, 40, 8, 128, 13824, 152064, qkv_bias=True),
    "qwen2-32B": LlamaArgs(5120, 64, 40, 8, 128, 27648, 152064, qkv_bias=True),
    "qwen2-72B": LlamaArgs(8192, 80, 64, 8, 128, 29568, 152064, qkv_bias=True),
    "qwen3-0.6B": _qwen3(1024, 28, 16, 8, 128, 3072, 151936, tie_embeddings=True),
    "qwen3-1.7B": _qwen3(2048, 28, 16, 8, 128, 6144, 151936, tie_embeddings=True),
    "qwen3-4B": _qwen3(2560, 36, 32, 8, 128, 9728, 151936, tie_embeddings=True),
    "qwen3-8B": _qwen3(4096, 36, 32, 8, 128, 12288, 151936),
    "qwen3-14B": _qwen3(5120, 40, 40, 8, 128, 17408, 151936),
    "qwen3-32B": _qwen3(5120, 64, 64, 8, 128, 25600, 151936),
}
