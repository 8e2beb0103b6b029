"""From a stage's samples to each rank's share of a step: by its number alone, every token once."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.texts import REPOSITORY
from torchtitan_cp.attention import Plan, make_plan
from torchtitan_cp.data.batches import loader
from torchtitan_cp.data.batches.loader import BatchLayout, MicroBatch, read_step, read_steps
from torchtitan_cp.data.batches.samples import PackedSequence, Span

SEQ_LEN = 32


class Counting:
    """Sequence n holds the tokens from n * SEQ_LEN on; odd ones are two documents. It fails at `broken_at`."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at = broken_at

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return (5, SEQ_LEN - 5) if number % 2 else (SEQ_LEN,)

    def sequence(self, number: int) -> PackedSequence:
        if self.broken_at is not None and number >= self.broken_at:
            raise OSError("the disk is gone")
        tokens = np.arange(number * SEQ_LEN, (number + 1) * SEQ_LEN)
        lengths = self.document_lengths(number)
        positions = np.concatenate([np.arange(length) for length in lengths])
        spans = tuple(Span("numbers", number, 0, length) for length in lengths)
        return PackedSequence(tokens, tokens + 1, positions, lengths, spans)


def batch_layout_of(
    dp_rank: int = 0, dp: int = 1, cp_rank: int = 0, cp: int = 1, layout: str = "zigzag"
) -> BatchLayout:
    planner = partial(make_plan, ranks=cp, rank=cp_rank, layout=layout)
    return BatchLayout(SEQ_LEN, 3, 2, dp=dp, dp_rank=dp_rank, make_plan=planner, windows=(0, 8))


def tokens_of(step: tuple[MicroBatch, ...]) -> list[int]:
    return torch.cat([batch.tokens.flatten() for batch in step]).tolist()


@pytest.mark.parametrize(
    ("dp", "cp", "layout"), [(1, 1, "zigzag"), (2, 1, "zigzag"), (2, 4, "zigzag"), (1, 2, "balanced")]
)
def test_the_ranks_of_a_step_hold_each_of_its_tokens_once(dp: int, cp: int, layout: str) -> None:
    shapes = [batch_layout_of(dp_rank, dp, cp_rank, cp, layout) for dp_rank in range(dp) for cp_rank in range(cp)]
    held = [token for shape in shapes for token in tokens_of(read_step(Counting(), shape, 7))]
    assert sorted(held) == list(range(7 * shapes[0].tokens, 8 * shapes[0].tokens))


def test_the_thread_that_pins_a_batch_prepares_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Plan] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(loader, "prepare_plan", prepared.append)
    batch = read_step(Counting(), batch_layout_of(), 0)[0]
    batch.pin_memory()
    assert prepared == [batch.plans[0], batch.plans[8]]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_micro_batches_of_all_ranks_carry_like_work(dp: int) -> None:
    steps = [read_step(Counting(), batch_layout_of(rank, dp), 0) for rank in range(dp)]
    assert sorted(number for step in steps for batch in step for number in batch.numbers) == list(range(6 * dp))
    for index in range(3):
        parities = [sorted(number % 2 for number in step[index].numbers) for step in steps]
        assert parities == [parities[0]] * dp, "each rank has as many long documents"


def test_labels_positions_and_plans_are_those_of_the_rows() -> None:
    for cp_rank in range(2):
        for batch in read_step(Counting(), batch_layout_of(cp_rank=cp_rank, cp=2), 1):
            assert torch.equal(batch.labels, batch.tokens + 1), "the label of a chunk's last token is in the next chunk"
            assert batch.plans.keys() == {0, 8}
            assert batch.plans[8].layout == batch.plan.layout
            assert batch.plans[8].mask.window == (7, -1)
            places = batch.tokens % SEQ_LEN
            documents = [Counting().document_lengths(number) for number in batch.numbers]
            if all(row == (SEQ_LEN,) for row in documents):
                assert batch.plan.mask.document_lengths is None
                assert torch.equal(batch.positions, places[0])
            else:
                assert batch.plan.mask.document_lengths == tuple(documents)
                odd = torch.tensor([number % 2 == 1 for number in batch.numbers]).unsqueeze(1)
                assert torch.equal(batch.positions.expand(2, -1), torch.where(odd & (places >= 5), places - 5, places))


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


def test_every_token_knows_its_place_in_its_document() -> None:
    step = read_step(Counting(), batch_layout_of(cp_rank=1, cp=2, layout="zigzag"), 0)
    for batch in step:
        assert batch.sources == ("numbers",) * len(batch.tokens)
        for row, number in enumerate(batch.numbers):
            places = np.concatenate([np.arange(length) for length in Counting().document_lengths(number)])
            assert batch.document_positions[row].tolist() == places[batch.plan.positions].tolist()


def test_all_tensors_of_a_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read_step(Counting(), batch_layout_of(), 0)[0]
    pinned = list[int]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: (pinned.append(id(x)), x)[1])
    batch.pin_memory()
    assert set(pinned) == {id(value) for value in vars(batch).values() if isinstance(value, torch.Tensor)}
    assert len(pinned) == 4


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


SIGNALLED = """
import os, signal
from pathlib import Path
from tests.unit.data.test_loader import Counting, batch_layout_of, tokens_of
from torchtitan_cp.data.batches.loader import read_step, read_steps

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


def test_layers_whose_window_hides_nothing_have_the_plan_of_those_without_one() -> None:
    plans = replace(batch_layout_of(), windows=(0, 8, SEQ_LEN - 1, SEQ_LEN, 2 * SEQ_LEN)).plans()
    assert plans[SEQ_LEN] is plans[2 * SEQ_LEN] is plans[0]
    assert plans[8].mask.window == (7, -1)
    assert plans[SEQ_LEN - 1].mask.window == (SEQ_LEN - 2, -1)
