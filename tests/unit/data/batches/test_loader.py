"""Steps are read ahead in order, by a thread or by workers, whose errors reach the rank."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing import current_process, util
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.counting import Counting, batch_layout_of, tokens_of
from tests.support.texts import REPOSITORY
from torchtitan_cp.data.batches import loader
from torchtitan_cp.data.batches.loader import read_steps
from torchtitan_cp.data.batches.micro_batches import MicroBatch, read_step
from torchtitan_cp.data.batches.packed_stream import PackedSequence
from torchtitan_cp.data.errors import DataError


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_ahead_gives_the_steps_in_order_and_goes_on_from_any(workers: int) -> None:
    shape = batch_layout_of(1, 2)
    options = {"workers": workers, "read_ahead": 2, "pin": False}
    run = [tokens_of(step) for step in read_steps(Counting(), 0, 5, shape, **options)]  # type: ignore[arg-type]
    assert run == [tokens_of(read_step(Counting(), shape, index)) for index in range(5)]
    resumed = list(read_steps(Counting(), 2, 3, shape, **options))  # type: ignore[arg-type]
    assert [tokens_of(step) for step in resumed] == run[2:]
    assert resumed[0][0].plan == read_step(Counting(), shape, 2)[0].plan, "a plan from a worker is one's own"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_reader_reaches_the_one_who_waits(workers: int) -> None:
    shape = batch_layout_of()
    steps = read_steps(Counting(broken_at=6), 0, 3, shape, workers=workers, read_ahead=2, pin=False)
    with pytest.raises(OSError, match="the disk is gone"):
        list(steps)


class Killed(Counting):
    """The process that reads sequence 6 is killed there, as by a system short of memory."""

    def sequence(self, number: int) -> PackedSequence:
        if number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sequence(number)


def test_a_worker_that_is_killed_is_an_error_and_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else torch looks after its workers every five seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        list(read_steps(Killed(), 0, 3, batch_layout_of(), workers=1, read_ahead=2, pin=False))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_gone_when_its_tensors_are_fetched_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", fail)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(read_steps(Counting(), 0, 3, batch_layout_of(), workers=1, read_ahead=2, pin=False))


class Limited(Counting):
    """The process that reads may write no file of more than a few bytes, so it has no shared memory."""

    def sequence(self, number: int) -> PackedSequence:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
        return super().sequence(number)


@pytest.mark.deep  # it starts a worker
def test_a_worker_without_room_in_shared_memory_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(DataError, match=r"/dev/shm .* has no room for the batches that data.workers keep ready"):
        list(read_steps(Limited(), 0, 3, batch_layout_of(), workers=1, read_ahead=2, pin=False))


def test_what_a_worker_sends_is_in_shared_memory_before_it_is_sent() -> None:
    read = partial(read_step, Counting(), batch_layout_of())
    tensors = [x for batch in loader._read_into_shared_memory(read, 1) for x in vars(batch).values()]
    assert {x.is_shared() for x in tensors if isinstance(x, torch.Tensor)} == {True}


@pytest.mark.parametrize(
    "message",
    [
        "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
        "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory.",
    ],
)
def test_shared_memory_that_is_full_is_named_with_its_size_and_the_fix(message: str) -> None:
    def fail() -> Iterator[tuple[MicroBatch, ...]]:
        raise RuntimeError(message)
        yield

    with pytest.raises(DataError) as caught:
        next(loader._receive(fail()))
    assert re.fullmatch(
        r"/dev/shm \([\d,.]+ MB\) has no room for the batches that data.workers keep ready", caught.value.message
    )
    assert "--shm-size=8g" in caught.value.fix
    assert "data.workers = 0" in caught.value.fix


def test_semaphores_without_room_are_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loader.DataLoader, "__iter__", fail)
    with pytest.raises(DataError, match="/dev/shm"):
        read_steps(Counting(), 0, 3, batch_layout_of(), workers=1, read_ahead=2, pin=False)


@pytest.fixture
def no_sockets_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has chosen no folder for sockets; one that the test chooses is removed."""
    settings = dict[str, str]()
    monkeypatch.setattr(current_process(), "_config", settings)
    monkeypatch.setattr(util, "Finalize", lambda *_, **__: None)  # would remove it when pytest exits
    yield
    shutil.rmtree(settings.get("tempdir", ""), ignore_errors=True)


@pytest.mark.usefixtures("no_sockets_yet")
@pytest.mark.parametrize("length", [75, 76, 200])
def test_sockets_of_workers_fit_whatever_the_length_of_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="x" * (length - len(tempfile.gettempdir()) - 9)) as folder:
        assert len(folder) == length
        monkeypatch.setattr(tempfile, "tempdir", folder)
        loader._choose_socket_folder()
        Listener(family="AF_UNIX").close()
        assert (folder == os.path.dirname(util.get_temp_dir())) == (length <= 75)
        assert tempfile.gettempdir() == folder


@pytest.mark.usefixtures("no_sockets_yet")
def test_a_machine_without_a_folder_for_sockets_is_told_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataError) as caught:
        loader._choose_socket_folder()
    assert "is too long for the sockets of data.workers, whose paths have at most 107 bytes" in caught.value.message
    assert caught.value.fix == "set TMPDIR to a folder of at most 75 bytes, or data.workers = 0"


@pytest.mark.deep  # it starts workers
def test_workers_start_under_a_long_temporary_folder(tmp_path: Path) -> None:
    folder, script = tmp_path / ("x" * 100), tmp_path / "program.py"
    folder.mkdir()
    script.write_text(SIGNALLED[: SIGNALLED.index("    started =")])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)}
    subprocess.run([sys.executable, script], cwd=REPOSITORY, env=environment, timeout=240, check=True)


SIGNALLED = """
import os, signal
from pathlib import Path
from tests.support.counting import Counting, batch_layout_of, tokens_of
from torchtitan_cp.data.batches.loader import read_steps
from torchtitan_cp.data.batches.micro_batches import read_step

def descendants(pid):
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)

if __name__ == "__main__":
    layout = batch_layout_of()
    steps = read_steps(Counting(), 0, 12, layout, workers=2, read_ahead=2, pin=False)
    read = [next(steps)]
    started = [*descendants(os.getpid())]
    assert len(started) >= 4, "two workers, the server that forked them, and the resource tracker"
    files = [Path(f"/proc/{pid}/maps").read_text() for pid in started]
    assert sum("libtorch" in mapped for mapped in files) == 3, "the server has imported torch, and the workers share it"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for pid in started:
            os.kill(pid, number)
    read += steps
    assert [tokens_of(step) for step in read] == [tokens_of(read_step(Counting(), layout, n)) for n in range(12)]
    held_at_exit = read_steps(Counting(), 0, 12, layout, workers=2, read_ahead=2, pin=False)
    next(held_at_exit)
"""


@pytest.mark.deep  # it waits for signals
def test_workers_survive_the_signals_of_a_scheduler_and_not_their_process(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SIGNALLED)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, script], cwd=REPOSITORY, env=environment, timeout=120, check=True)


KILLED = (
    SIGNALLED[: SIGNALLED.index("    for number in")]
    + """    print(*started, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.deep  # it starts workers
def test_workers_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, script]
    # Its workers have its output, so this waits for them too.
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=60, check=False, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout
