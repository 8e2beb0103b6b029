"""A mixture of experts: Llama's block with a router and experts in place of the SwiGLU.

Source: OLMoE (Muennighoff et al., 2024), Qwen3 (2025), DeepSeek-V3 (2024); the balance loss, Switch Transformer (Fedus
et al., 2021), over each sequence by itself as in DeepSeek-V3, section 2.1.2; the z-loss, ST-MoE (Zoph et al., 2022).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.architecture import Attend, Head
from models.llama.model import Attention, FeedForward, Llama
from models.moe.flavors import MoeArgs


class Moe(Llama):
    """Llama with experts, whose routers have losses.

    Let f[e] be the share of a sequence's choices that fell on expert e, p[t, e] the router's scores for token t, made
    to sum to one, and z[t] the log-sum-exp of its logits. The losses are the sums over layers and tokens of `balance` *
    X * sum over e of f[e] p[t, e], which is `balance` a layer and token where the experts are balanced, and of
    `router_z_loss` * z[t]^2. f is counted over the whole sequence, also where ranks share it, and has no gradient; so
    the losses are sums over tokens, like the cross-entropy, and like it do not depend on how sequences are distributed
    over ranks and micro-batches. Tokens whose label is ignored count in them.

    Args:
        args: sizes; vocab_size must be set.
        attend: what mixes tokens.
    """

    args: MoeArgs

    def __init__(self, args: MoeArgs, attend: Attend) -> None:
        super().__init__(args, attend)
        self.add_loss = attend.add_loss

    def block(self, attend: Attend, number: int) -> nn.Module:
        """See Llama."""
        return MoeBlock(self.args, attend, self.args.mixers[number].window)

    @property
    def experts(self) -> dict[int, nn.Module]:
        """The experts of each layer, by its number."""
        return {int(number): layer.experts for number, layer in self.layers.items()}  # type: ignore[misc]

    @property
    def expert_gates(self) -> dict[int, tuple[nn.Module, str]]:
        """See LanguageModel."""
        return {number: (experts, "gated") for number, experts in self.experts.items()}

    @property
    def router_biases(self) -> dict[int, Tensor]:
        """By number of the layer, fp32 `[X]`: added to the experts' scores, for the choice alone."""
        if not self.args.expert_bias:
            return {}
        return {int(number): layer.router.expert_bias for number, layer in self.layers.items()}  # type: ignore[misc, union-attr]

    def to_empty(self, *, device: torch.types.Device, recurse: bool = True) -> "Moe":
        """Like that of any module; biases start at zero."""
        super().to_empty(device=device, recurse=recurse)
        for bias in self.router_biases.values():
            bias.zero_()
        return self

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> object:
        """See Llama."""
        hidden = self.tok_embeddings(tokens) if self.is_first else tokens
        cos, sin = self._rotations(positions)
        router_losses = torch.zeros((), device=hidden.device)
        for layer in self.layers.values():
            hidden, layer_losses = layer(hidden, cos, sin, plans)
            router_losses = router_losses + layer_losses
        if self.training:
            hidden = self.add_loss(hidden, router_losses)
        return self.finish(hidden, head)


class MoeBlock(nn.Module):
    """One layer: Llama's attention, then the experts of each token.

    Its halves are methods of their own, since torch.compile takes only the first: how many tokens an expert gets is
    known only when it runs.
    """

    def __init__(self, args: MoeArgs, attend: Attend, window: int) -> None:
        super().__init__()
        self.args = args
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, attend, window)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.router = Router(args)
        self.experts = Experts(args)
        shared = replace(args, ffn_dim=args.n_shared_experts * args.ffn_dim)
        self.shared_experts = FeedForward(shared) if args.n_shared_experts else None
        self.sum_ranks = attend.sum_ranks

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, plans: object) -> tuple[Tensor, Tensor]:
        """Hidden states, and in training the losses of the router: a sum over this rank's tokens, fp32."""
        return self.experts_half(self.attention_half(hidden, cos, sin, plans), plans)

    def attention_half(self, hidden: Tensor, cos: Tensor, sin: Tensor, plans: object) -> Tensor:
        """The first half, as in Llama."""
        return hidden + self.attention(self.attention_norm(hidden), cos, sin, plans)

    def experts_half(self, hidden: Tensor, plans: object) -> tuple[Tensor, Tensor]:
        """The second half, and what forward returns."""
        has_losses = self.training and (self.args.balance or self.args.router_z_loss)
        losses = self.router_losses(hidden, plans) if has_losses else torch.zeros((), device=hidden.device)
        return self.mlp(hidden), losses

    def router_losses(self, hidden: Tensor, plans: object) -> Tensor:
        """Balance and z-loss, see Moe. The router runs twice, which is cheap."""
        logits, scores, chosen, _ = self.router(self.ffn_norm(hidden))
        if self.args.score_function == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        balance = balance_loss([scores], [chosen.flatten(1)], self.sum_ranks, plans)
        return self.args.balance * balance + self.args.router_z_loss * logits.logsumexp(-1).square().sum()

    def mlp(self, hidden: Tensor) -> Tensor:
        """The second half without the losses, a function of each token alone."""
        x = self.ffn_norm(hidden)
        _, _, chosen, shares = self.router(x)
        out = hidden + self.experts(x.flatten(0, 1), chosen.flatten(0, 1), shares.flatten(0, 1)).view_as(hidden)
        return out + self.shared_experts(x) if self.shared_experts else out


def balance_loss(
    scores: Sequence[Tensor], chosen: Iterable[Tensor], sum_ranks: Callable[[Tensor, object], Tensor], plans: object
) -> Tensor:
    """X times the sum over tokens t and experts e of f[e] p[t, e], with f and p as in Moe, f counted over all layers.

    Args:
        scores: p of each layer, `[B, S/cp, X]` fp32; a token's sum to one.
        chosen: the experts of all tokens in each layer, `[B, S/cp K]` int64.
        sum_ranks: as of Attend.
    """
    counts = torch.zeros_like(scores[0][:, 0], dtype=torch.int64)
    for experts in chosen:
        counts = counts.scatter_add(1, experts, torch.ones_like(experts))
    counts = sum_ranks(counts, plans)
    shares = counts / counts.sum(-1, keepdim=True)
    return shares.shape[-1] * torch.stack([torch.einsum("bse,be->", p, shares) for p in scores]).sum()


class Router(nn.Module):
    """Chooses the experts of a token."""

    def __init__(self, args: MoeArgs) -> None:
        super().__init__()
        self.args = args
        self.gate = nn.Linear(args.dim, args.n_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(args.n_experts) if args.expert_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits and scores `[B, s, X]` fp32; the K chosen experts `[B, s, K]` int64, and their shares, fp32."""
        args, logits = self.args, self.gate(x.flatten(0, 1)).float().unflatten(0, x.shape[:2])
        scores = logits.sigmoid() if args.score_function == "sigmoid" else logits.softmax(-1)
        ranking = scores.detach()
        if self.expert_bias is not None:
            ranking = ranking + self.expert_bias
        if args.n_groups > 1:
            groups = ranking.unflatten(-1, (args.n_groups, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(args.groups_per_token, -1).indices
            excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
            ranking = groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = ranking.topk(args.experts_per_token, -1).indices
        shares = scores.gather(-1, chosen)
        if args.normalize_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
        return logits, scores, chosen, shares * args.routed_scaling_factor


class Experts(nn.Module):
    """SwiGLUs, of which a token uses a few: w1, w3 `[X, F, E]`, w2 `[X, E, F]`."""

    def __init__(self, args: MoeArgs) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(args.n_experts, args.ffn_dim, args.dim))
        self.w3 = nn.Parameter(torch.empty(args.n_experts, args.ffn_dim, args.dim))
        self.w2 = nn.Parameter(torch.empty(args.n_experts, args.dim, args.ffn_dim))

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum of a token's experts. An expert without tokens gets a gradient of zero.

        Args:
            hidden: `[T, E]`; T may be 0.
            chosen: `[T, K]` int64, numbers below len(w1).
            shares: `[T, K]`.
        """
        order = chosen.flatten().argsort(stable=True)
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        # bincount would make the host wait for a GPU.
        counts = chosen.new_zeros(len(self.w1)).index_add(0, chosen.flatten(), torch.ones_like(order))
        # Rows are put, never gathered: then backward gathers, where it would add, in bf16 and with atomics.
        rows = hidden.new_empty(len(order), hidden.shape[1])
        rows.index_put_((places.view_as(chosen),), hidden[:, None].expand(-1, chosen.shape[1], -1))
        outputs = swiglus(rows, counts, self.w1, self.w3, self.w2, self.gated)
        spread = torch.empty_like(outputs).index_put_((order,), outputs).view(*chosen.shape, hidden.shape[1])
        return torch.einsum("tke,tk->te", spread, shares.to(hidden.dtype))

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        """What lies between the products, for rows `[T, F]`."""
        return F.silu(gate) * up


def swiglus(
    rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, gated: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """A SwiGLU of each expert on its own rows.

    Args:
        rows: `[T, E]`, in the order of their experts.
        counts: `[X]` int64, rows of each expert.
        gated: (gate, up) `[T, F]` -> their product `[T, F]`.
    """
    if len(rows) and has_grouped_products(rows, w1.shape[1]):
        ends = counts.cumsum(0, dtype=torch.int32).to(rows.device)
        up, gate = (F.grouped_mm(rows, w.mT, offs=ends) for w in (w3, w1))
        return F.grouped_mm(gated(gate, up), w2.mT, offs=ends)
    parts = zip(rows.split(counts.tolist()), w1, w3, w2, strict=True)
    return torch.cat([F.linear(gated(F.linear(x, w1), F.linear(x, w3)), w2) for x, w1, w3, w2 in parts])


def has_grouped_products(rows: Tensor, ffn_dim: int) -> bool:
    """Whether one kernel can multiply all experts: in bf16 from Hopper on, with rows of a multiple of 16 bytes."""
    fits = rows.dtype == torch.bfloat16 and rows.shape[1] % 8 == ffn_dim % 8 == 0
    on_gpu = rows.is_cuda and torch.cuda.is_available()
    return fits and on_gpu and torch.cuda.get_device_capability(rows.device) >= (9, 0)
