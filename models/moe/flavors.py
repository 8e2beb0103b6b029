"""Sizes of mixtures of experts by name. Source: the config.json of each released checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.llama.flavors import LlamaArgs


@dataclass(frozen=True)
class MoeArgs(LlamaArgs):
    """Sizes of a Llama model whose MLPs are experts; `ffn_dim` is the width of one.

    Attributes:
        n_experts: X, experts of a layer.
        experts_per_token: K, experts that a token is sent to.
        normalize_shares: the K shares of a token sum to one (Qwen3-MoE); else they are those of the softmax over all
            experts (OLMoE).
        balance: weight of the balance loss beside the cross-entropy of a token.
    """

    n_experts: int = 8
    experts_per_token: int = 2
    normalize_shares: bool = True
    balance: float = 1e-3

    def linear_parameters(self) -> int:
        """Weights that multiply a token once, including those of its experts only."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        experts = self.experts_per_token * 3 * self.dim * self.ffn_dim + self.dim * self.n_experts
        return self.n_layers * (attention + experts) + self.dim * self.vocab_size

    def matrix_parameters(self) -> int:
        """See LlamaArgs: all experts."""
        passed_by = (self.n_experts - self.experts_per_token) * 3 * self.dim * self.ffn_dim
        return self.linear_parameters() + self.n_layers * passed_by

    @property
    def token_ffn_dim(self) -> int:
        """See LlamaArgs."""
        return self.experts_per_token * self.ffn_dim

    @property
    def token_copies(self) -> int:
        """See LlamaArgs."""
        return self.experts_per_token

    def problem(self) -> str | None:
        """Why these sizes are not a valid model, or None."""
        if not 1 <= self.experts_per_token <= self.n_experts:
            return f"experts_per_token = {self.experts_per_token} of n_experts = {self.n_experts} cannot be chosen"
        if self.balance < 0:
            return f"balance = {self.balance} would reward experts that are always chosen"
        return super().problem()


FLAVORS = {
    "debug": MoeArgs(192, 4, 6, 2, 32, 192, tie_embeddings=True, n_experts=8, experts_per_token=2),
    "qwen3-30B-A3B": MoeArgs(
        *(2048, 48, 32, 4, 128, 768, 151936),
        norm_eps=1e-6,
        qk_norm=True,
        n_experts=128,
        experts_per_token=8,
    ),
}

PUBLISHED_ROPE: dict[str, Mapping[str, Any]] = {"qwen3-30B-A3B": {"theta": 1e6}}
