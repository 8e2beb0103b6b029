"""Qwen3.5: three gated delta nets, then one layer of gated full attention, each before a SwiGLU.

What crosses tokens is handed in: `attend` as for Llama, and its methods `causal_conv` and `gated_delta_rule`. Sources:
Gated Delta Networks (Yang et al., 2024); Qwen3-Next and Qwen3.5 (Qwen team, 2025 and 2026); names and order of
operations, `modeling_qwen3_5` of Hugging Face transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.architecture import Attend
from models.llama.model import Attention, Block, Llama, rotate
from models.qwen3_5.flavors import HybridArgs


class CenteredRMSNorm(nn.RMSNorm):
    """RMSNorm in fp32, times one plus its weight `[dim]`, which starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).type_as(x)


class Hybrid(Llama):
    """Llama whose layers are gated delta nets and gated attention.

    Args:
        args: sizes; vocab_size must be set.
        attend: what mixes tokens.
    """

    args: HybridArgs
    norm_type = CenteredRMSNorm

    def block(self, attend: Attend, number: int) -> nn.Module:
        """See Llama."""
        args, linear = self.args, self.args.linear_layers[number]
        mixer = GatedDeltaNet(args, attend) if linear else GatedAttention(args, attend, args.mixers[number].window)
        return Block(args, mixer, self.norm_type)

    def init_std(self, parameter: str) -> float | None:
        """See Llama. A norm's weight is added to one; a head forgets by about exp(-A), A from 0.1 to 10."""
        if "norm" in parameter:
            return None if parameter.endswith("attention.norm.weight") else 0.0
        if parameter.endswith("A_log"):
            return 1.0
        if parameter.endswith("dt_bias"):
            return None
        return super().init_std(parameter.replace("attention.out.", "attention.wo."))


class GatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid of its input; RoPE turns the first entries of a head."""

    def __init__(self, args: HybridArgs, attend: Attend, window: int) -> None:
        super().__init__(args, attend, window)
        self.wq = nn.Linear(args.dim, 2 * args.n_heads * args.head_dim, bias=False)  # of each head, the query, its gate
        self.q_norm, self.k_norm = (CenteredRMSNorm(args.head_dim, eps=args.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plans: object) -> Tensor:
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wk, self.wv))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)  # type: ignore[misc]
        out = self.attend(q, k, v, plans, self.window)
        return self.wo((out * gate.sigmoid()).flatten(-2))


class GatedDeltaNet(nn.Module):
    """A short convolution of queries, keys and values, the gated delta rule, and a gated norm of each head."""

    def __init__(self, args: HybridArgs, attend: Attend) -> None:
        super().__init__()
        self.key_dim, self.value_dim = args.linear_key_dim, args.linear_value_dim
        self.sizes = [args.linear_key_heads * self.key_dim] * 2 + [args.linear_value_heads * self.value_dim]
        self.attend, self.causal_conv = attend.gated_delta_rule, attend.causal_conv
        self.wqkv = nn.Linear(args.dim, sum(self.sizes), bias=False)
        self.wz = nn.Linear(args.dim, self.sizes[2], bias=False)
        self.wb, self.wa = (nn.Linear(args.dim, args.linear_value_heads, bias=False) for _ in range(2))
        self.conv_weight = nn.Parameter(torch.zeros(sum(self.sizes), 1, args.conv_width))  # as in nn.Conv1d
        self.A_log = nn.Parameter(torch.zeros(args.linear_value_heads))
        self.dt_bias = nn.Parameter(torch.ones(args.linear_value_heads))
        self.norm = nn.RMSNorm(self.value_dim, eps=args.norm_eps)
        self.out = nn.Linear(self.sizes[2], args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plans: object) -> Tensor:
        mixed = self.causal_conv(self.wqkv(x), self.conv_weight.squeeze(1), plans, activation="silu")
        q, k, v = mixed.split(self.sizes, -1)
        q, k = (y.unflatten(-1, (-1, self.key_dim)) for y in (q, k))
        v, z = (y.unflatten(-1, (-1, self.value_dim)) for y in (v, self.wz(x)))
        log_decay = -self.A_log.float().exp() * F.softplus(self.wa(x).float() + self.dt_bias.float())
        out = self.attend(q, k, v, log_decay, self.wb(x).sigmoid(), plans, qk_l2norm=True)
        out = (self.norm(out) * F.silu(z.float())).to(x.dtype)
        return self.out(out.flatten(-2))
