"""Who is to blame for a hang, from what the ranks last told each other."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_cp.runtime import watchdog as failure
from torchtitan_cp.runtime.watchdog import Beat, describe, report_lost_ranks

BATCH, STEP = "waiting for its batch", "in forward, backward and update with the others"


def beat(host: str, what: str, step: int = 7) -> Beat:
    return Beat(host, 99, what, step, 12.0, "data/loader.py:9 in read")


def test_a_silent_rank_is_to_blame_and_the_others_wait() -> None:
    text = describe({0: beat("a", STEP), 1: beat("b", STEP, 6), 2: beat("c", STEP)}, {1: 30.0})
    assert text.splitlines() == [
        f"  no sign of life from rank 1 for 30 s. Last heard on b, pid 99: step 6, {STEP} for 12 s, "
        "at data/loader.py:9 in read",
        f"  rank 0 waits for the others on a, pid 99: step 7, {STEP} for 12 s, at data/loader.py:9 in read",
    ]


def test_a_rank_that_never_joined_is_named() -> None:
    assert "no sign of life from rank 1 for 30 s. Last heard never" in describe({0: beat("a", STEP, 0)}, {1: 30.0})


def test_where_all_are_alive_the_one_that_does_something_else_is_to_blame() -> None:
    text = describe({0: beat("a", STEP), 1: beat("b", BATCH), 2: beat("c", STEP)}, {})
    assert text == f"  rank 1 hangs on b, pid 99: step 7, {BATCH} for 12 s, at data/loader.py:9 in read"


def raise_another_error() -> None:
    with report_lost_ranks():
        raise RuntimeError("shapes do not fit")


def test_another_error_passes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        raise_another_error()


def test_a_process_of_another_node_with_this_host_name_is_not_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    here = Beat(socket.gethostname(), child.pid, "", 1, 0.0, "", "0")
    monkeypatch.setenv("GROUP_RANK", "0")
    assert here.is_gone
    assert not here._replace(node="1").is_gone


def test_what_nccl_says_last_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "GRACE_SECONDS", 0.0)
    said = "NCCL error in: a.cpp:1, unhandled cuda error\nmore\nLast error:\nCuda failure 2 'out of memory'"
    with pytest.raises(failure.LostRankError), report_lost_ranks():
        raise RuntimeError(said)
    assert "unhandled cuda error ... Last error: Cuda failure 2 'out of memory'" in caplog.text


def test_a_stopped_and_a_dead_process_are_told_from_a_live_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not failure._is_gone(process.pid)
    process.send_signal(19)
    deadline = time.monotonic() + 10
    while not failure._is_gone(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert failure._is_gone(process.pid)


def test_what_nccl_recorded_is_written_where_its_groups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda: b"gloo", raising=False)
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", lambda: b"nccl", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        failure.dump_flight_recorder(tmp_path, 3)
        assert (tmp_path / "flight_recorder" / "rank-3.json").read_text() == backend
