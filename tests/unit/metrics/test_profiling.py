"""What the time of traced steps went into."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_cp.metrics.profiling import covered, time_on_gpu


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=8))
def test_spans_cover_what_any_of_them_covers(spans: list[tuple[int, int]]) -> None:
    assert covered(spans) == len({place for start, stop in spans for place in range(start, stop)})


def test_messages_beside_kernels_are_hidden_and_the_others_exposed() -> None:
    def kernel(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
        times = SimpleNamespace(start=start * 1e6, end=end * 1e6)
        return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation="::" in name)

    events = [
        kernel("gemm", 0, 4),
        kernel("ncclDevKernel_SendRecv", 2, 7),
        kernel("flash_fwd", 6, 9),
        kernel("aten::mm", 0, 10, "DeviceType.CPU"),
        kernel("FSDP::all_gather", 2, 10),
    ]
    shares = time_on_gpu(events, 10.0, waited=1.5, in_flight=5.0)
    assert shares == pytest.approx(
        {
            "compute": 7.0,
            "messages, hidden": 3.0,
            "messages, exposed": 2.0,
            "of which CP exchange, in stream time": 1.5,
            "device idle": 1.0,
        }
    )
