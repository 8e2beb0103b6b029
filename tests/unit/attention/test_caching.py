"""Results kept on host and device within their bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_cp.attention import AttentionMask, caching, make_plan
from torchtitan_cp.attention.caching import ENTRY_BYTES, KEPT_BYTES, BoundedCache, host_bytes, keep_newest, to_device


def test_results_are_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand plans were kept, of 45 MB each for 100,000 documents: memory grew with every step."""
    made, quarter = list[int](), KEPT_BYTES // ENTRY_BYTES // 4

    @keep_newest
    def draw(number: int) -> tuple[tuple[int, ...], ...]:
        made.append(number)
        return ((0,) * quarter,)

    for number in (1, 2, 3, 4, 1, 5, 1, 2):
        draw(number)
    assert made == [1, 2, 3, 4, 5, 1, 2]

    sizes = []
    for tokens in (64, 128):
        plan = make_plan(tokens, mask=AttentionMask(document_lengths=((1,) * tokens,)))
        sizes.append(host_bytes((plan,)))
    assert sizes[1] - sizes[0] >= 64 * ENTRY_BYTES, "of a plan they go by its documents"
    counted: list[Any] = []
    monkeypatch.setattr(caching, "host_bytes", lambda *given: counted.append(given) or host_bytes(*given))
    assert host_bytes((plan.segments[0],)) == 128 * ENTRY_BYTES
    assert len(counted) == 1, "a call for each document would take half as long as its plan"


def test_a_device_cache_holds_the_last_used_within_its_bytes() -> None:
    like, made, cache = torch.empty(1), [], BoundedCache(budget_bytes=100)

    def value(key: str, numbers: int) -> Tensor:
        def make() -> Tensor:
            made.append(key)
            return torch.zeros(numbers, dtype=torch.uint8)

        return cache.get(key, like, make)

    value("a", 40), value("b", 40), value("a", 40), value("c", 40)
    assert cache.held_bytes == 80
    value("a", 40), value("b", 40)
    assert made == ["a", "b", "c", "b"], "b was used least of late when c came"
    value("too large", 500)
    assert (cache.held_bytes, len(cache.entries)) == (500, 1)


def test_a_tensor_that_inference_mode_put_into_a_cache_can_be_trained_with() -> None:
    cache, rows = BoundedCache(1000), torch.randn(3, 2, requires_grad=True)
    with torch.inference_mode():
        cache.get("index", torch.empty(2), lambda: to_device(torch.arange(2), torch.empty(2)))
    index = cache.get("index", rows, lambda: torch.arange(3))
    rows.index_select(0, index).sum().backward()  # keeps the index for its backward
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [1, 1, 0]


def test_a_device_cache_keeps_tensors_without_data_to_their_mode() -> None:
    cache, shapes = BoundedCache(1000), torch.arange(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        like = torch.empty(2, device="meta")
        fake = cache.get("key", like, lambda: to_device(shapes, like))
    real = cache.get("key", torch.empty(2), lambda: to_device(shapes, torch.empty(2)))
    assert torch.equal(real, shapes)
    assert fake.device.type == "meta"
