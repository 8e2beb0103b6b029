"""How a command ends, and that one of one process leaves another job's ranks alone."""

import os
import sys

import pytest
import torch.distributed as dist

import train
from torchtitan_cp.cli import evaluate
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.runtime import environment

FOREIGN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _rank_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an operator of Kubernetes sets it in each pod."""
    monkeypatch.delenv(environment.AGENT_RUN, raising=False)
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("on_ranks", [True, False])
def test_a_command_sees_no_rank_that_torchrun_did_not_give_it(
    capsys: pytest.CaptureFixture[str], on_ranks: bool
) -> None:
    seen: list[str] = []
    assert run_command(lambda: seen.extend(FOREIGN.keys() & os.environ.keys()) or 0, on_ranks=on_ranks) == 0
    assert seen == []
    note = "note: one process; torchrun did not start it, so RANK of the environment is ignored\n"
    assert capsys.readouterr().err == note * on_ranks


@pytest.mark.parametrize(("on_ranks", "kept"), [(True, set(FOREIGN)), (False, set())])
def test_only_a_command_that_several_ranks_may_run_keeps_the_rank_that_torchrun_gave_it(
    monkeypatch: pytest.MonkeyPatch, on_ranks: bool, kept: set[str]
) -> None:
    monkeypatch.setenv(environment.AGENT_RUN, "none")
    seen: set[str] = set()
    assert run_command(lambda: seen.update(FOREIGN.keys() & os.environ.keys()) or 0, on_ranks=on_ranks) == 0
    assert seen == kept


def test_evaluate_does_not_wait_for_the_ranks_of_another_job(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "WAIT_SECONDS", 1.0)
    try:
        assert evaluate.main([str(tmp_path)]) == 2
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert f"error: {tmp_path} is not a checkpoint and contains none" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_train_py_says_what_is_wrong_whatever_rank_another_job_has_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    if not arguments:
        monkeypatch.delenv("MASTER_ADDR")
    assert train.main(["none.toml", *arguments]) == 2
    assert "error: cannot read none.toml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [
        (PreparationStoppedError("stopped while tokenizing"), 143, "stopped while tokenizing\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_that_is_stopped_ends_without_a_traceback(
    stop: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise stop

    assert run_command(work) == code
    assert capsys.readouterr().err == said


def test_a_command_whose_output_nobody_reads_ends_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w"))
    assert run_command(lambda: bool(print("said", flush=True))) == 1
    monkeypatch.undo()
    assert capsys.readouterr().err == (
        "error: Broken pipe: what read this output, or another process of this command, has ended\n"
    )
