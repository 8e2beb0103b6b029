"""The attention function that transformers calls in place of its own: every keyword is honoured or refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "torchtitan_cp"
# Keywords without effect here: q and k already have their positions, and the other outputs are not used.
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position", "is_causal"}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    plans: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, by `module.attend`.

    Args:
        module: the layer's; it has `attend`, and `shared.plans` for families that drop unknown keywords.
        query: `[B, Hq, S/cp, Dqk]`; key `[B, Hkv, S/cp, Dqk]`; value `[B, Hkv, S/cp, Dv]`.
        scaling: of the scores; a tensor `[]` multiplies the queries.
        sliding_window: keys that a query sees, itself included.
        s_aux: `[Hq]`, sinks.

    Returns:
        (`[B, S/cp, Hq, Dv]` contiguous, no weights).

    Raises:
        ValueError: a mask, dropout or keyword that would be ignored.
    """
    unsupported = [name for name, value in others.items() if name not in HARMLESS and value is not None]
    if attention_mask is not None:
        unsupported.append("a mask")
    if dropout:
        unsupported.append("dropout")
    if s_aux is not None and s_aux.ndim != 1:
        unsupported.append("sinks by token")
    if unsupported:
        raise ValueError(
            f"{type(module).__name__} calls attention with {', '.join(unsupported)}, which is not supported"
        )
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    plans = module.shared.plans if plans is None else plans  # type: ignore[union-attr]
    options: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    out = module.attend(q, k, v, plans, sliding_window or 0, scale=scaling, softcap=softcap or 0.0, **options)  # type: ignore[operator]
    return out.contiguous(), None


@contextmanager
def registered(interface: Any, name: str, function: Any) -> Iterator[None]:
    """A context in which an interface of transformers has this function by this name."""
    functions = interface._global_mapping
    before = {name: functions[name]} if name in functions else {}
    functions[name] = function
    try:
        yield
    finally:
        del functions[name]
        functions.update(before)


AttentionInterface.register(NAME, attention)
