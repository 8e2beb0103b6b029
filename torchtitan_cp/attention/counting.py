"""Follows what a model counts within a shard, to where it would stand for positions: queries, keys and values."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_COUNTERS = (torch.arange, torch.cumsum, Tensor.cumsum)
_LOOKUP = re.compile(r"^(__getitem__|index_select|gather|take|take_along_dim|masked_select)$")
_WRITE = re.compile(r"^(__setitem__|index_put|index_add|index_copy|scatter|scatter_add|scatter_reduce)_?$")
_SHAPE_ONLY = re.compile(r"^(new_\w+|\w+_like)$")


class CountTracker:
    """Which tensors depend on a count of a shard's tokens.

    Masks and the routing to experts count too. A count that only says which rows of the data to take does not make
    their values depend on it; in a table, such as one of positions, it does.

    Args:
        local_tokens: S/P; a count has so many entries along some dim.
        data: tensors that the sharded sequence comes in.
    """

    def __init__(self, local_tokens: int, data: Iterable[Tensor]) -> None:
        self.local_tokens = local_tokens
        self._data = WeakTensorKeyDictionary(dict.fromkeys(data, True))  # and what is computed from it
        self._counters = WeakTensorKeyDictionary()

    def counter_of(self, tensors: Iterable[object]) -> str:
        """The function whose count one of these depends on; "": none does."""
        return next((self._counters[x] for x in _tensors(tensors) if x in self._counters), "")

    def follow(
        self, func: Callable[..., object], args: Sequence[object], named: Mapping[str, object], out: object
    ) -> None:
        """Take note of a function's call."""
        name, inputs = getattr(func, "__name__", ""), [*args, *named.values()]
        outputs = [*_tensors([args[0] if name == "__setitem__" else out])]
        if not outputs:
            return
        counter = self._counter(func, name, inputs, outputs[0])
        is_data = any(x in self._data for x in _tensors(inputs))
        for x in outputs:
            if is_data:
                self._data[x] = True
            if counter:
                self._counters[x] = counter

    def _counter(self, func: Callable[..., object], name: str, inputs: list[object], out: Tensor) -> str:
        if func in _COUNTERS and self._counts_tokens(out):
            return name
        if not self._counters or _SHAPE_ONLY.match(name):
            return ""
        if _LOOKUP.match(name):
            inputs = inputs[:1] if inputs[0] in self._data else inputs
        elif _WRITE.match(name):  # all but the index, which follows the dim, where there is one
            del inputs[2 if isinstance(inputs[1], int) and name != "__setitem__" else 1]
        return self.counter_of(inputs)

    def _counts_tokens(self, out: Tensor) -> bool:
        last = self.local_tokens - 1
        return 0 < last == out.shape[-1] - 1 and bool((out[..., -1] - out[..., 0] == last).all())


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among values, and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))
