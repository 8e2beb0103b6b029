"""A small decoder with every option of attention, and the ten ways in which context parallelism makes one wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_cp.attention import AttentionMask, ContextParallel, Plan, attend, doctor

LENGTH, DIM, HEADS, HEAD_DIM, WINDOW, SCALE, CAP = 128, 32, 4, 8, 24, 0.6, 4.0
CHUNK = 80  # longer than the shard of two ranks
DOCUMENTS = (37, 1, 90)
MASK = AttentionMask(document_lengths=(DOCUMENTS,))
BASES = {"full": 0.3, "sliding": 0.5}


class SelfAttention(nn.Module):
    """Attention by formulas on one process, ours with a plan; `fault` says what ours forgets."""

    def __init__(self, window: int, fault: str) -> None:
        super().__init__()
        self.window, self.fault = window, fault
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEAD_DIM)
        self.sinks = nn.Parameter(torch.ones(HEADS))
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: Tensor, angles: Tensor, plans: dict[int, Plan] | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = rotate(q, angles), rotate(k, angles)
        if plans is None or self.fault == "unreached":
            return self.out(self.formulas(q, k, v).flatten(2))
        options = {"scale": SCALE, "softcap": CAP, "sinks": self.sinks}
        options.pop({"scale": "scale", "cap": "softcap", "sink": "sinks"}.get(self.fault, ""), None)
        plan = plans[0 if self.fault == "window" else self.window]
        return self.out(attend(q, k, v, plan, **options).flatten(2))  # type: ignore[arg-type]

    def formulas(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.arange(q.shape[1])
        numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS))[: len(rows)]
        distance = rows[:, None] - rows
        seen = (distance >= 0) & (distance < (self.window or len(rows))) & (numbers[:, None] == numbers)
        scores = CAP * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE / CAP)
        column = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class Rotary(nn.Module):
    """Angles for a kind of layer."""

    def forward(self, positions: Tensor, kind: str) -> Tensor:
        return positions[:, :, None] * BASES[kind] ** torch.arange(HEAD_DIM // 2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    angles = angles[:, :, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class ShortConv(nn.Module):
    """Each token hears the one before it in the same shard."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 2, groups=DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (1, 0))).mT


class Experts(nn.Module):
    """Two rows a token, in an order of their own: the last document's first. They are as wide as a sequence is long."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, LENGTH), nn.Linear(LENGTH, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        tokens = torch.arange(len(rows)).roll(-sum(DOCUMENTS[:-1])).repeat(2)
        return torch.zeros_like(rows).index_add(0, tokens, self.down(F.silu(self.up(rows[tokens])))).view_as(x)


class Layer(nn.Module):
    def __init__(self, window: int, fault: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), SelfAttention(window, fault)
        self.mlp = ShortConv() if fault == "recurrence" else nn.Sequential(nn.Linear(DIM, DIM), Experts())

    def forward(self, x: Tensor, angles: Tensor, plans: dict[int, Plan] | None) -> Tensor:
        x = x + self.attention(self.norm(x), angles, plans)
        return x + F.silu(self.mlp(x))


class Decoder(nn.Module):
    """Two layers, the second with a window; the fault is in the second.

    Ranks take the kinds of layers in other orders, as models of transformers do, which go through a set.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.rotary = nn.Embedding(50, DIM), Rotary()
        self.layers = nn.ModuleList([Layer(0, ""), Layer(WINDOW, fault)])
        self.norm = nn.RMSNorm(DIM)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor, plans: dict[int, Plan] | None) -> Tensor:
        self.forwards += 1
        if self.fault == "positions" and plans:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens)
        kinds = sorted(BASES, reverse=torch.distributed.get_rank() % 2 == 1)
        angles = {kind: self.rotary(positions, kind) for kind in kinds}
        for layer, kind in zip(self.layers, BASES, strict=True):
            x = layer(x, angles[kind], plans)
        return self.norm(x) @ self.embed.weight.T


def step(model: nn.Module, batch: dict[str, Tensor], cp: ContextParallel | None) -> Tensor:
    """A forward and backward, as a user writes it."""
    fault, plans, count = model.fault, None, batch["labels"].numel()
    if cp:
        masks = {
            window: AttentionMask(window=(window - 1, -1), document_lengths=MASK.document_lengths)
            for window in (0, WINDOW)
        }
        length = LENGTH
        if fault == "documents":
            masks = {window: AttentionMask(window=mask.window) for window, mask in masks.items()}
        if fault == "twice":
            masks = {window: AttentionMask(window=mask.window) for window, mask in masks.items()}
            batch = {name: cp.plan(length).shard(x) for name, x in batch.items()}
            length = batch["tokens"].shape[1]
        first = cp.plan(length, masks[0])
        plans = {window: cp.plan(length, mask, like=first) for window, mask in masks.items()}
        batch = {name: plans[0].shard(x) for name, x in batch.items()}
    logits = model(batch["tokens"], batch["positions"], plans)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss = losses.sum() / (losses.numel() if fault == "average" else count)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach()


def examined(fault: str, strategy: str = "ring") -> tuple[str, str, bool]:
    """On a rank: the report's text, and whether weights and buffers are as they were."""
    torch.manual_seed(0)
    model = Decoder(fault)
    before = [x.clone() for x in model.state_dict().values()]
    model.norm.weight.grad = torch.ones(DIM)  # of a step before
    cp = ContextParallel(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), strategy, kernel="reference")
    tokens = torch.randint(50, (1, LENGTH))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": positions}
    report = doctor(model, cp, batch, mask=MASK, step=step)
    return report.fault, report.text, all(map(torch.equal, before, model.state_dict().values()))


class SdpaAttention(nn.Module):
    """Calls scaled_dot_product_attention, or computes the same by hand; a chunk shows where it is shorter than x."""

    def __init__(self, *, by_hand: bool, chunk: int = LENGTH) -> None:
        super().__init__()
        self.qkv, self.by_hand, self.chunk = nn.Linear(DIM, 3 * DIM), by_hand, chunk

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        if x.shape[1] > self.chunk:
            rows = torch.arange(x.shape[1])
            seen = (rows[:, None] >= rows) & (rows[:, None] // self.chunk == rows // self.chunk)
            return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        weights = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class SdpaDecoder(nn.Module):
    """Gives the sum of its losses over `count`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embed, self.places = nn.Embedding(50, DIM), nn.Embedding(LENGTH, DIM)
        self.attention = SdpaAttention(by_hand=fault == "by hand", chunk=CHUNK if fault == "chunks" else LENGTH)
        self.conv = nn.Conv1d(DIM, DIM, 2) if fault == "recurrence" else nn.Identity()

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        if self.fault == "positions":
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens) + self.places(positions)
        x = x + self.attention(x)
        if self.fault == "recurrence":
            x = x + self.conv(F.pad(x.mT, (1, 0))).mT
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH


def intercepted(fault: str) -> str:
    """On a rank: the report's text on a module whose SDPA calls are intercepted."""
    torch.manual_seed(0)
    cp = ContextParallel(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), "ring")
    tokens = torch.randint(50, (1, LENGTH))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": torch.arange(LENGTH)[None]}
    return doctor(SdpaDecoder(fault), cp, batch, mask=MASK if fault == "documents" else None).text
