"""Ranks that lose each other, and ranks that would not run the same thing."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import FORK, RankFailure, RankPool
from torchtitan_cp.config import load_config
from torchtitan_cp.runtime import watchdog as failure
from torchtitan_cp.runtime.consistency import check_same_job, code_version
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.runtime.watchdog import LOST_RANK, LostRankError, Watchdog, report_lost_ranks, set_activity

GLOO_PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
REASON = "Read error [10.0.0.1]:42: Connection reset by peer"
BATCH, STEP = "waiting for its batch", "in forward, backward and update with the others"


def lose_contact(folder: Path) -> tuple[int, str]:
    lines: list[str] = []
    failure.logger.error = lambda message, *values: lines.append(message % values)  # type: ignore[method-assign]
    set_activity(STEP, 4, 60.0)
    message = ""
    with Watchdog(dist.get_rank(), dist.get_world_size(), 0.2, folder) as watch:
        dist.barrier()
        try:
            with report_lost_ranks(watch):
                raise RuntimeError(f"{GLOO_PLACE}{REASON}. This is typically caused by a remote worker hanging\nmore")
        except LostRankError as error:
            message = str(error)
        dist.barrier()
    assert message == REASON
    return len(lines), "\n".join(lines)


def test_lost_contact_is_told_by_one_rank_with_the_places_of_all(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    answers = ranks(2)(lose_contact, tmp_path)
    assert sorted(count for count, _ in answers) == [0, 1]
    text = max(text for _, text in answers)
    assert f"lost contact with another rank ({REASON})" in text
    assert f"step 4, {STEP}" in text
    assert sorted(path.name for path in (tmp_path / "flight_recorder").iterdir()) == ["rank-0.json", "rank-1.json"]


class GoneStore:
    """Went with the rank that held it."""

    asked = 0

    def __getattr__(self, method: str) -> Callable[..., None]:
        def ask(*arguments: object) -> None:
            GoneStore.asked += 1
            raise dist.DistNetworkError("Broken pipe")

        return ask


def lose_the_store(folder: Path) -> tuple[list[str], int]:
    lines: list[str] = []
    failure.logger.error = lambda message, *values: lines.append(message % values)  # type: ignore[method-assign]
    set_activity(STEP, 4, 60.0)
    with Watchdog(dist.get_rank(), dist.get_world_size(), 0.1, folder) as watch:
        dist.barrier()
        while 0 not in watch._known or watch._known[0].step != 4:
            time.sleep(0.01)
        dist.barrier()
        if dist.get_rank() == 1:
            store, watch._store = watch._store, GoneStore()
            watch.report("lost contact with another rank")
            watch._store, watch._reachable = store, True
        dist.barrier()
    return lines, GoneStore.asked


def test_the_rank_that_held_the_store_is_told_by_what_it_last_said(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    _, (lines, asked) = ranks(2)(lose_the_store, tmp_path)
    assert len(lines) == 1
    assert re.search(rf"no sign of life from rank 0 for \d s\. Last heard on \S+, pid \d+: step 4, {STEP}", lines[0])
    assert f": step 4, {STEP}" in lines[0].splitlines()[-1]
    assert lines[0].splitlines()[-1].startswith("  rank 1 waits for the others on")
    assert asked <= 2, "once by the report or the thread, or by both at the same time"


# Ranks without a launcher, of which one is lost ------------------------------------------------------------------

BEAT_SECONDS, LIMIT_SECONDS = 0.2, 20.0


def wait_for_each_other(rank: int, ranks: int, port: int, folder: Path, host: str, *, collective: bool) -> None:
    """A process of a job: step 4, without end."""
    join(rank, ranks, port, folder, host)
    with Watchdog(rank, ranks, BEAT_SECONDS, folder):
        dist.barrier()
        time.sleep(4 * BEAT_SECONDS)
        (folder / f"waits-{rank}").touch()
        while collective:
            dist.all_reduce(torch.zeros(1))
        # As inside a CUDA call: no error of another rank reaches it.
        threading.Event().wait()


def leave_one_after_the_other(rank: int, ranks: int, port: int, folder: Path) -> None:
    """A process of a job whose rank 0 still writes something when the others have ended."""
    join(rank, ranks, port, folder, "one")
    with Watchdog(rank, ranks, BEAT_SECONDS, folder):
        dist.barrier()
        if rank == 0:
            time.sleep(10 * BEAT_SECONDS)


def join(rank: int, ranks: int, port: int, folder: Path, host: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    socket.gethostname = lambda: host or f"host {rank}"
    start_ranks(60.0)
    set_activity(STEP, 4, LIMIT_SECONDS)
    failure.GRACE_SECONDS = 0.5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def lose_a_rank(folder: Path, lost: int, how: signal.Signals, host: str, ranks: int = 2) -> tuple[list[str], float]:
    """Start a job and lose a rank. Returns what each survivor logged, and the seconds until the last had ended."""
    place, collective = (ranks, free_port(), folder, host), {"collective": how == signal.SIGSTOP}
    jobs = [
        FORK.Process(target=wait_for_each_other, args=(rank, *place), kwargs=collective, daemon=True)
        for rank in range(ranks)
    ]
    try:
        for job in jobs:
            job.start()
        deadline = time.monotonic() + 60
        while len(list(folder.glob("waits-*"))) < ranks:
            assert time.monotonic() < deadline, [path.read_text() for path in folder.glob("log-*")]
            time.sleep(0.01)
        assert jobs[lost].pid is not None
        os.kill(jobs[lost].pid, how)
        begun = time.monotonic()
        survivors = [rank for rank in range(ranks) if rank != lost]
        for rank in survivors:
            jobs[rank].join(LIMIT_SECONDS)
        seconds = time.monotonic() - begun
        assert [jobs[rank].exitcode for rank in survivors] == [LOST_RANK] * len(survivors)
        return [(folder / f"log-{rank}").read_text() for rank in survivors], seconds
    finally:
        for job in jobs:
            job.kill()
            job.join()


@pytest.mark.parametrize(
    ("lost", "how", "host"),
    [
        pytest.param(1, signal.SIGSTOP, "one", id="stopped in a collective"),
        pytest.param(0, signal.SIGSTOP, "one", id="the store's rank stopped", marks=pytest.mark.deep),
        pytest.param(0, signal.SIGKILL, "one", id="the store's rank killed"),
        pytest.param(1, signal.SIGSTOP, "", id="cut off on another host", marks=pytest.mark.deep),
    ],
)
def test_a_rank_whose_peer_is_lost_names_it_and_ends_by_itself(
    tmp_path: Path, lost: int, how: signal.Signals, host: str
) -> None:
    [log], seconds = lose_a_rank(tmp_path, lost, how, host)
    assert re.search(rf"no sign of life from rank {lost} for \d s: rank {1 - lost} was {STEP}; the job is ended", log)
    last = rf"Last heard on {host or 'host'}.*, pid \d+: step 4, {STEP} for \d s, at "
    known = f"rank {lost} has ended or is stopped" if host else rf"no sign of life from rank {lost} for \d s"
    assert re.search(rf"{known}\. {last}", log), log
    # A tenth of the limit in silence, and as long again to make sure; a process that has ended is known at once.
    assert seconds < 0.2 * LIMIT_SECONDS + failure.GRACE_SECONDS + 2.0, seconds


def test_the_ranks_that_do_not_listen_to_the_lost_one_hear_of_it_and_end_too(tmp_path: Path) -> None:
    logs, _ = lose_a_rank(tmp_path, 2, signal.SIGKILL, "one", ranks=4)
    assert sum("rank 2 has ended or is stopped" in log for log in logs) == 1, logs
    assert sum("no sign of life" in log for log in logs) == 1, logs


def test_ranks_that_leave_at_the_end_are_not_missed(tmp_path: Path) -> None:
    place = (2, free_port(), tmp_path)
    jobs = [FORK.Process(target=leave_one_after_the_other, args=(rank, *place), daemon=True) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0], [path.read_text() for path in tmp_path.glob("log-*")]


def take_a_step(port: int, folder: Path) -> None:
    """A job of one rank, whose step takes two seconds of the three that it may take."""
    join(0, 1, port, folder, "one")
    set_activity(STEP, 4, 3.0)
    with Watchdog(0, 1, BEAT_SECONDS, folder):
        (folder / "runs").touch()
        for _ in range(20):
            time.sleep(0.1)


def test_a_job_that_was_held_still_as_a_whole_goes_on(tmp_path: Path) -> None:
    job = FORK.Process(target=take_a_step, args=(free_port(), tmp_path), daemon=True)
    job.start()
    assert job.pid is not None
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(job.pid, signal.SIGCONT)
    job.join(60)
    assert job.exitcode == 0, (tmp_path / "log-0").read_text()


# Ranks that would not run the same thing -----------------------------------------------------------------------


def compare(paths: list[Path], sources: list[Path]) -> None:
    rank = dist.get_rank()
    check_same_job(load_config(paths[rank]), [sources[rank]])


@pytest.fixture
def configs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("one.toml", "other.toml")]
    for path in paths:
        path.write_text("[[curriculum.stages]]\nseq_len = 128\n")
    return paths


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name / "package" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1\n")
    return folders


def test_ranks_with_the_same_config_and_code_agree(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    ranks(2)(compare, configs, sources)


def test_ranks_with_different_configs_are_refused_with_the_difference(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    configs[1].write_text("training.seed = 5\n[[curriculum.stages]]\nseq_len = 256\n")
    with pytest.raises(
        RankFailure,
        match=r"(?s)the ranks differ in config, code or versions: training.seed: rank 0 has 0, rank 1 has 5; "
        r"curriculum.stages\[0\].seq_len: rank 0 has 128, rank 1 has 256\n.*from the same files",
    ):
        ranks(2)(compare, configs, sources)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[[curriculum.stages]]\n", r"curriculum.stages: rank 0 has '\[0\]', rank 1 has '\[0\], \[1\]'"),
        (
            "rope = {kind = 'ntk', factor = 2}\n",
            r"curriculum.stages\[0\].rope: rank 0 has None, rank 1 has 'theta",
        ),
        ("[model.overrides]\ndim = 8\n", r"model.overrides: rank 0 has 'nothing', rank 1 has 'dim'"),
        (
            "[evaluation.passkey]\nvariants = []\n",
            r"evaluation.passkey.variants: rank 0 has \('passkey',\), rank 1 has \(\)",
        ),
    ],
)
def test_an_entry_that_one_rank_alone_has_is_found(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path], more: str, message: str
) -> None:
    with configs[1].open("a") as file:
        file.write(more)
    with pytest.raises(RankFailure, match=message):
        ranks(2)(compare, configs, sources)


def test_ranks_with_different_code_are_refused(
    ranks: Callable[[int], RankPool], configs: list[Path], sources: list[Path]
) -> None:
    (sources[1] / "a.py").write_text("x = 2\n")
    with pytest.raises(RankFailure, match=r"versions: the code: rank 0 has version 1, rank 1 has version 2"):
        ranks(2)(compare, configs, sources)
    (sources[1] / "a.py").write_text("x = 1\n")
    (sources[1] / "a.py").rename(sources[1] / "b.py")
    assert code_version([sources[0]]) != code_version([sources[1]])
