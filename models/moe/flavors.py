"""Sizes of mixtures of experts by name. Source: the config.json of each released checkpoint."""

from dataclasses import dataclass
from functools import partial

from models.llama.flavors import LlamaArgs

SCORE_FUNCTIONS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MoeArgs(LlamaArgs):
    """Sizes of a Llama model whose MLPs are experts; `ffn_dim` is the width of one.

    Attributes:
        n_experts: X, experts of a layer.
        experts_per_token: K, experts that a token is sent to.
        score_function: turns a token's logits into scores: `softmax` over all experts, or `sigmoid` of each
            (DeepSeek-V3).
        normalize_shares: the K shares of a token sum to one (Qwen3-MoE); else they are the scores (OLMoE).
        routed_scaling_factor: multiplies the shares.
        n_groups: groups of equally many neighbouring experts.
        groups_per_token: groups that a token chooses experts from, those with the best sum of their two best scores
            (DeepSeek-V3).
        n_shared_experts: all tokens pass a SwiGLU of this many times `ffn_dim`; 0: none.
        expert_bias: each expert has a buffer that is added to its score for the choice alone, and that
            training.router_bias_update changes (Wang et al., 2024).
        balance: weight of the balance loss beside the cross-entropy of a token.
        router_z_loss: weight of the squared log-sum-exp of a token's router logits (ST-MoE, Zoph et al., 2022).
    """

    n_experts: int = 8
    experts_per_token: int = 2
    normalize_shares: bool = True
    balance: float = 1e-3
    score_function: str = "softmax"
    routed_scaling_factor: float = 1.0
    n_groups: int = 1
    groups_per_token: int = 1
    n_shared_experts: int = 0
    expert_bias: bool = False
    router_z_loss: float = 0.0

    @property
    def last_products(self) -> tuple[str, ...]:
        """See ModelArgs."""
        shared = "layers.{}.shared_experts.w2" if self.n_shared_experts else ""
        return tuple(shared.format(number) for number in range(self.n_layers))

    @property
    def active_ffn_dim(self) -> int:
        """See LlamaArgs."""
        return (self.experts_per_token + self.n_shared_experts) * self.ffn_dim

    def problem(self) -> str | None:
        """Why these sizes are not a valid model, or None."""
        if not 1 <= self.experts_per_token <= self.n_experts:
            return f"experts_per_token = {self.experts_per_token} of n_experts = {self.n_experts} cannot be chosen"
        if self.score_function not in SCORE_FUNCTIONS:
            return f"score_function = {self.score_function!r} is none of {', '.join(SCORE_FUNCTIONS)}"
        if not 1 <= self.groups_per_token <= self.n_groups or self.n_experts % self.n_groups:
            return f"groups_per_token = {self.groups_per_token} of n_groups = {self.n_groups} cannot be chosen"
        group_size = self.n_experts // self.n_groups
        if self.n_groups > 1 and group_size < 2:
            return f"n_groups = {self.n_groups} leaves a group one expert, and a group's score is of its two best"
        if self.experts_per_token > self.groups_per_token * group_size:
            return f"experts_per_token = {self.experts_per_token} are more than {self.groups_per_token} groups have"
        if self.n_shared_experts < 0 or self.routed_scaling_factor <= 0 or self.router_z_loss < 0:
            return "n_shared_experts, routed_scaling_factor and router_z_loss cannot be negative, nor the factor 0"
        if self.balance < 0:
            return f"balance = {self.balance} would reward experts that are always chosen"
        return super().problem()


_qwen3 = partial(MoeArgs, norm_eps=1e-6, qk_norm=True, n_experts=128, experts_per_token=8)
FLAVORS = {
    "debug": MoeArgs(192, 4, 6, 2, 32, 192, tie_embeddings=True, n_experts=8, experts_per_token=2),
    "qwen3-30B-A3B": _qwen3(2048, 48, 32, 4, 128, 768, 151936),
    "qwen3-235B-A22B": _qwen3(4096, 94, 64, 4, 128, 1536, 151936),
}
