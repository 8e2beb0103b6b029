"""Llama: RMSNorm, rotary attention with grouped heads, SwiGLU. Plain modules that know no ranks.

The attention itself is a callable handed in, (q, k, v, plans, window) -> out; the model passes `plans` through
unread, and says which window the layer has. Names follow the published checkpoints of Meta. Source: Touvron
et al., 2023; Dubey et al., 2024; the options, Qwen2 (Yang et al., 2024), Qwen3 and gpt-oss (2025).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.architecture import Attend, Head, LanguageModel
from models.llama.flavors import LlamaArgs


class Llama(LanguageModel):
    """A decoder over tokens whose global positions are given, so that a shard of a sequence is enough.

    Args:
        args: sizes; vocab_size must be set.
        attend: what mixes tokens. With sinks it also gets `sinks=` `[Hq]`.
    """

    norm_type: type[nn.Module] = nn.RMSNorm

    def __init__(self, args: LlamaArgs, attend: Attend) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # By number, so that a pipeline stage keeps the names of its layers.
        blocks = {str(number): self.block(attend, number) for number in range(args.n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = self.norm_type(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.rope: tuple[Tensor, float] | None = None
        self.is_first = self.is_last = True

    def block(self, attend: Attend, number: int) -> nn.Module:
        """Build a layer; relatives of Llama override this."""
        attention = Attention(self.args, attend, self.args.mixers[number].window)
        return Block(self.args, attention, self.norm_type)

    def keep_layers(self, first: int, stop: int) -> None:
        """Keep layers [first, stop), with the embedding before the first of all and the output after the last.

        An output tied to the embedding keeps the embedding's weight, under the embedding's name.
        """
        for number in [*range(first), *range(stop, self.args.n_layers)]:
            del self.layers[str(number)]
        self.is_first, self.is_last = first == 0, stop == self.args.n_layers
        if not self.is_last:
            del self.norm, self.output
        if not self.is_first and not (self.is_last and self.args.tie_embeddings):
            del self.tok_embeddings

    def set_rope(self, inverse_frequencies: Sequence[float], attention_factor: float, device: torch.device) -> None:
        """Use these rotary frequencies from the next forward on.

        Args:
            inverse_frequencies: rotary_dim/2 angles a position, in radians.
            attention_factor: multiplies cos and sin (1 except with scalings that say otherwise).
            device: where the model computes.
        """
        assert len(inverse_frequencies) == self.args.rotary_dim // 2
        self.rope = (torch.tensor(inverse_frequencies, dtype=torch.float64, device=device), attention_factor)

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> object:
        """Run the network.

        Args:
            tokens: `[B, S/cp]` int64; where the first layers are not kept, hidden states `[B, S/cp, E]`.
            positions: `[S/cp]` or `[B, S/cp]` int64, position of each token for RoPE.
            plans: passed to attention.
            head: (hidden `[B, S/cp, E]`, output layer) -> result; lets a loss make its logits in chunks.

        Returns:
            logits `[B, S/cp, V]`, or what `head` returns; where the last layers are not kept, hidden states.
        """
        hidden = self.tok_embeddings(tokens) if self.is_first else tokens
        cos, sin = self._rotations(positions)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin, plans)
        return self.finish(hidden, head)

    def finish(self, hidden: Tensor, head: Head | None) -> object:
        """What forward returns, from the hidden states of the last layer that is kept."""
        if not self.is_last:
            return hidden
        hidden = self.norm(hidden)
        return head(hidden, self.output) if head else self.output(hidden)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, `[.., S/cp, 1, D/2]` fp32.

        Angles are formed in fp64: at position 1M an fp32 product is off by up to 0.06 radians.
        """
        assert self.rope is not None, "call set_rope first"
        frequencies, factor = self.rope
        angles = positions.to(torch.float64)[..., None] * frequencies
        return tuple((wave * factor).float().unsqueeze(-2) for wave in (angles.cos(), angles.sin()))  # type: ignore[return-value]

    def init_std(self, parameter: str) -> float | None:
        """Standard deviation of a parameter's first values, by name; 0 starts it at zero, None at one.

        Projections back into the residual stream are smaller with depth. Source: GPT-2.
        """
        if parameter.endswith((".bias", "sinks.weight")):
            return 0.0
        if "norm" in parameter:
            return None
        into_residual = parameter.removesuffix(".weight").endswith(("wo", "w2"))  # the w2 of experts is not a module
        return 0.02 * (2 * self.args.n_layers) ** -0.5 if into_residual else 0.02


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind its norm, each added to the residual stream."""

    def __init__(self, args: LlamaArgs, attention: nn.Module, norm_type: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.attention_norm = norm_type(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = norm_type(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, plans: object) -> Tensor:
        return self.mlp(hidden + self.attention(self.attention_norm(hidden), cos, sin, plans))

    def mlp(self, hidden: Tensor) -> Tensor:
        """The second half, a function of each token alone."""
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class Attention(nn.Module):
    """Projections and rotation around the attention that was handed in."""

    def __init__(self, args: LlamaArgs, attend: Attend, window: int) -> None:
        super().__init__()
        self.head_dim, self.attend, self.window = args.head_dim, attend, window
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.q_norm: nn.Module | None = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm: nn.Module | None = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.sinks = Sinks(args.n_heads) if args.sinks else None
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plans: object) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # the unrotated tensors are freed before attention runs
        options = {"sinks": self.sinks()} if self.sinks else {}
        out = self.attend(q, k, v, plans, self.window, **options)
        return self.wo(out.flatten(-2))


class Sinks(nn.Module):
    """A logit for each head, `[Hq]`. A module of its own, so that it can be sharded like the heads."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_heads))

    def forward(self) -> Tensor:
        return self.weight


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer, 2020."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R/2) of the first R entries of `[.., S/cp, H, D]` by their R/2 angles, in fp32.

    Pairs are halves apart, as in Hugging Face checkpoints (Meta's files interleave them).
    """
    turned, kept = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned
