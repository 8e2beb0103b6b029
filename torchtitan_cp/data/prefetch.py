"""Reading ahead in a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items in order; a thread takes up to `count` of them ahead. Its exceptions are raised here."""
    thread, end = ThreadPoolExecutor(max_workers=1), object()
    ready: deque[Future[Any]] = deque(thread.submit(next, items, end) for _ in range(count))
    try:
        while (item := ready.popleft().result()) is not end:
            ready.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
