"""Attention with every score in memory, in `[B, H, S, D]`, and the checks that the operators share."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Wrong readings of the sources. Each is injected by a test, and the kernel files must then be found wrong.
MISREADINGS = (
    "flash: window from the top left",
    "flash: right side of the window one too wide",
    "flash: left side of the window one too narrow",
    "flash: lse is [B, S, H]",
    "flash: lse of varlen is [T, H]",
    "flash: cu_seqlens one too far",
    "flash: max_q one too small",
    "flash4: window from the top left",
    "flash4: right side of the window one too wide",
    "flash4: left side of the window one too wide",
    "flash4: the sides of the window change places",
    "flash4: lse is [B, S, H]",
    "flash4: lse of varlen is [T, H]",
    "flash4: cu_seqlens of queries and keys change places",
    "flash4: backward uses the out of its own call",
    "flash4: backward takes dout before out",
    "flash4: backward gives dv before dk",
    "flash4: soft-cap before the scale",
    "flash4: soft-cap is not differentiated",
    "cudnn: lse is [B, S, H, 1]",
    "efficient: lse is not padded",
    "efficient: lse is [B, S, H]",
    "efficient: rows of out are apart",
    "scale is ignored",
    "scale is squared",
    "lse in base 2",
    "heads are grouped interleaved",
    "causal without the diagonal",
    "causal from the bottom right",
    "backward uses the lse of its own call",
)
_misread = ""


@contextmanager
def reading(misread: str) -> Iterator[None]:
    """Within the context, the operators follow a wrong reading."""
    global _misread
    before, _misread = _misread, misread
    try:
        yield
    finally:
        _misread = before


def misreads(name: str) -> bool:
    return _misread == name


def check(condition: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not condition:
        raise RuntimeError(message)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels keep sums and the log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_rows(elements: int, **tensors: Tensor) -> None:
    """Rows are contiguous, and all rows start at a multiple of `elements`, which the kernels load at once."""
    for name, x in tensors.items():
        check(x.stride(-1) == 1, f"{name} must have contiguous last dimension")
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        check(not any(step % elements for step in (x.storage_offset(), *steps)), f"{name} is misaligned: {x.stride()}")


def at_strides(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The memory behind `x`, read with strides that need not be its own."""
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    check(last < x.untyped_storage().nbytes() // x.element_size(), "an illegal memory access was encountered")
    return torch.as_strided(x, shape, strides, x.storage_offset())


def packed(x: Tensor, *shape: int) -> Tensor:
    """The memory behind `x`, read as if it were contiguous."""
    return at_strides(x, shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def causal_pairs(queries: int, keys: int) -> Tensor:
    """`[Sq, Sk]` from the top left: a query sees the keys up to its own row."""
    last = keys - queries if misreads("causal from the bottom right") else 0
    return torch.ones(queries, keys, dtype=torch.bool).tril(last - misreads("causal without the diagonal"))


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out `[B, Hq, Sq, Dv]`, lse `[B, Hq, Sq]`); rows that see no key have out 0 and lse -inf.

    Args:
        q: `[B, Hq, Sq, D]`; k, v: `[B, Hkv, Sk, D]`.
        seen: `[Sq, Sk]` the visible pairs; None: all.
        softcap: above 0, a scaled score s becomes softcap tanh(s / softcap).
    """
    k, v = (_for_queries(x, q.shape[1]) for x in (k, v))
    scores = _masked(_scores(q, k, scale, softcap), seen)
    largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    out = weights @ v.to(scores.dtype) / torch.where(total == 0, 1, total)
    lse = (largest + total.log()).squeeze(-1)
    return out, lse * math.log2(math.e) if misreads("lse in base 2") else lse


def differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_dots: Tensor,
    lse: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), with dk and dv still one for each query head.

    Args:
        row_dots: `[B, Hq, Sq]` dout . out; lse: `[B, Hq, Sq]`. The rest is as for `attend`.
    """
    k, v = (_for_queries(x, q.shape[1]) for x in (k, v))
    capped = _scores(q, k, scale, softcap)
    scores = _masked(capped, seen)
    if misreads("backward uses the lse of its own call"):
        lse = scores.logsumexp(-1)
    if misreads("lse in base 2"):
        lse = lse / math.log2(math.e)
    # The kernels take a log-sum-exp of -inf as 0, and one of inf leaves no weight.
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0, lse).unsqueeze(-1))
    dout, q, k, v = (x.to(scores.dtype) for x in (dout, q, k, v))
    dscores = weights * (dout @ v.mT - row_dots.unsqueeze(-1)) * _read_scale(scale)
    if softcap and not misreads("flash4: soft-cap is not differentiated"):
        dscores = dscores * (1 - (capped / softcap).square())
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def sum_copies(gradient: Tensor, heads: int) -> Tensor:
    """`[B, Hq, S, D]` one for each query head, summed to the `heads` that are shared: blocks of neighbours."""
    if misreads("heads are grouped interleaved"):
        return gradient.unflatten(1, (-1, heads)).sum(1)
    return gradient.unflatten(1, (heads, -1)).sum(2)


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """Keys for each of `heads` query heads: head h reads head h // (Hq / Hkv)."""
    copies = heads // x.shape[1]
    return x.repeat(1, copies, 1, 1) if misreads("heads are grouped interleaved") else x.repeat_interleave(copies, 1)


def _read_scale(scale: float) -> float:
    return 1.0 if misreads("scale is ignored") else scale**2 if misreads("scale is squared") else scale


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """`[B, H, Sq, Sk]` scores of all pairs, scaled and then capped."""
    wide, scale = wide_dtype(q.dtype), _read_scale(scale)
    products = q.to(wide) @ k.to(wide).mT
    if not softcap:
        return products * scale
    if misreads("flash4: soft-cap before the scale"):
        return softcap * torch.tanh(products / softcap) * scale
    return softcap * torch.tanh(products * scale / softcap)


def _masked(scores: Tensor, seen: Tensor | None) -> Tensor:
    return scores if seen is None else torch.where(seen, scores, float("-inf"))
