"""A mixture of experts: Llama's block with a router and experts in place of the SwiGLU.

Every rank has every expert (sharded by FSDP like all weights), so tokens stay where they are. Source: OLMoE
(Muennighoff et al., 2024), Qwen3 (2025); the balance loss, Switch Transformer (Fedus et al., 2021), over each sequence
by itself as in DeepSeek-V3 (2024), section 2.1.2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama.model import Attend, Attention, Head, Llama
from models.moe.flavors import MoeArgs


class Moe(Llama):
    """Llama with experts. The balance loss joins the sum that the head gives, so the same division applies to it.

    Let f[e] be the share of a sequence's choices that fell on expert e, and p[t, e] the router's softmax for token
    t. The balance loss is the sum over layers and tokens of `balance` * X * sum over e of f[e] p[t, e], which is
    `balance` a layer and token where the experts are balanced. f is counted over the whole sequence, also where ranks
    share it, and has no gradient; so the loss is a sum over tokens, like the cross-entropy, and like it does not
    depend on how sequences are distributed over ranks and micro-batches. Tokens whose label is ignored count in it.

    Args:
        args: sizes; vocab_size must be set.
        attend: as Llama's; where a sequence lies on several ranks it has `sum_ranks(x, plan)`, the sum over these.
    """

    args: MoeArgs

    def block(self, args: Any, attend: Attend, number: int) -> nn.Module:
        """See Llama."""
        return MoeBlock(args, attend, args.layer_windows[number])

    def forward(self, tokens: Tensor, positions: Tensor, plan: Any, head: Head | None = None) -> Any:
        """See Llama. What `head` returns is (sum of losses, ...), and the sum comes back with the balance loss."""
        hidden = self.tok_embeddings(tokens)
        cos, sin = self._rotations(positions)
        balance = torch.zeros((), device=hidden.device)
        for layer in self.layers.values():
            hidden, of_layer = layer(hidden, cos, sin, plan)
            balance = balance + of_layer
        hidden = self.norm(hidden)
        if head is None:
            return self.output(hidden)
        result = head(hidden, self.output)
        if not self.training:
            return result
        loss_sum, *others = result
        return (loss_sum + self.args.balance * balance, *others)

    def init_std(self, parameter: str) -> float | None:
        """See Llama."""
        return super().init_std("w2.weight" if parameter.endswith("experts.w2") else parameter)


class MoeBlock(nn.Module):
    """One layer: Llama's attention, then the experts of each token."""

    def __init__(self, args: MoeArgs, attend: Attend, window: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, attend, window)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.router = Router(args)
        self.experts = Experts(args)
        self.sum_ranks = getattr(attend, "sum_ranks", None)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Hidden states, and in training the balance loss of the layer: a sum over this rank's tokens, fp32."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, plan)
        balance = self.balance(hidden, plan) if self.training else torch.zeros((), device=hidden.device)
        return self.mlp(hidden), balance

    def balance(self, hidden: Tensor, plan: Any) -> Tensor:
        """X times the sum over tokens and experts of f p; see Moe. The router runs twice, which is cheap."""
        probabilities, chosen = self.router(self.ffn_norm(hidden))
        counts = F.one_hot(chosen, probabilities.shape[-1]).sum((1, 2))
        if self.sum_ranks:
            counts = self.sum_ranks(counts, plan)
        shares = counts / counts.sum(-1, keepdim=True)
        return probabilities.shape[-1] * torch.einsum("bse,be->", probabilities, shares)

    def mlp(self, hidden: Tensor) -> Tensor:
        """The second half, a function of each token alone."""
        x = self.ffn_norm(hidden)
        probabilities, chosen = self.router(x)
        shares = probabilities.gather(-1, chosen)
        if self.router.normalize_shares:
            shares = shares / shares.sum(-1, keepdim=True)
        return hidden + self.experts(x.flatten(0, 1), shares.flatten(0, 1), chosen.flatten(0, 1)).view_as(hidden)


class Router(nn.Module):
    """Chooses the experts of a token."""

    def __init__(self, args: MoeArgs) -> None:
        super().__init__()
        self.experts_per_token, self.normalize_shares = args.experts_per_token, args.normalize_shares
        self.gate = nn.Linear(args.dim, args.n_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities `[B, s, X]` fp32 over all experts, and the K chosen ones `[B, s, K]` int64."""
        probabilities = self.gate(x).float().softmax(-1)
        return probabilities, probabilities.topk(self.experts_per_token, -1).indices


class Experts(nn.Module):
    """SwiGLUs, of which a token uses a few: w1, w3 `[X, F, E]`, w2 `[X, E, F]`."""

    def __init__(self, args: MoeArgs) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(args.n_experts, args.ffn_dim, args.dim))
        self.w3 = nn.Parameter(torch.empty(args.n_experts, args.ffn_dim, args.dim))
        self.w2 = nn.Parameter(torch.empty(args.n_experts, args.dim, args.ffn_dim))

    def forward(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of a token's experts.

        Args:
            x: `[tokens, E]`.
            shares: `[tokens, K]` fp32.
            chosen: `[tokens, K]` int64.
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=len(self.w1)).tolist()
        # An expert without tokens computes too, so that its gradient is zero and not missing.
        outputs = [
            F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2)
            for rows, w1, w3, w2 in zip(x[tokens].split(counts), self.w1, self.w3, self.w2, strict=True)
        ]
        weighted = torch.cat(outputs) * shares.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted)
