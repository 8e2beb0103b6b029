"""A rank that is gone is told in one line; every other error stays what it is."""

import logging

import pytest

from torchtitan_cp.parallel import failure
from torchtitan_cp.parallel.failure import LostRankError, name_lost_ranks


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, without waiting."""
    seconds: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:2938",
        "[enforce fail at pair.cc:409] Read error: Connection reset by peer",
        "Application timeout caused pair closure",
        "[1] is setting up NCCL communicator: Timed out after 300 seconds waiting for clients",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error",
        "ncclRemoteError: remote process exited or there was a network error",
        "writev: Broken pipe",
    ],
)
def test_a_transports_error_becomes_a_line_that_says_what_to_do(
    waits: list[float], caplog: pytest.LogCaptureFixture, message: str
) -> None:
    with pytest.raises(LostRankError), name_lost_ranks(300.0):
        raise RuntimeError(message + "\nwith a second line")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    told = record.getMessage()
    assert told.startswith(f"lost contact with another rank ({message}). ")
    assert "job.timeout_seconds = 300." in told
    assert "Run the same command again to resume." in told
    assert "\n" not in told


def test_the_launcher_is_given_time_to_see_who_died_first(waits: list[float]) -> None:
    with pytest.raises(LostRankError), name_lost_ranks(60.0):
        raise RuntimeError("Connection closed by peer")
    assert waits == [failure.GRACE_SECONDS]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("Connection closed by peer"),
    ],
)
def test_an_error_of_this_rank_passes_at_once_and_unchanged(
    waits: list[float], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with pytest.raises(type(error)) as raised, name_lost_ranks(60.0):
        raise error
    assert raised.value is error
    assert waits == []
    assert caplog.records == []


def test_where_nothing_fails_nothing_is_said(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with name_lost_ranks(60.0):
        pass
    assert (waits, caplog.records) == ([], [])
