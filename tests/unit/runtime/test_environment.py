"""Whether a process is a rank of a job, and whether the process that started it has ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_cp.runtime.environment import forget_rank, has_ended, is_launched, launcher_pid

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
BY_AGENT = {**PLACE, "LOCAL_RANK": "1", "GROUP_RANK": "0", "ROLE_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
ROOT = Path(__file__).parents[3]
ASK = "from torchtitan_cp.runtime.environment import *; print(is_launched())"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BY_AGENT, "TORCHTITAN_CP_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


def ask(child_environment: dict[str, str], *, through_a_rank: bool) -> bool:
    """What a process says of itself; `through_a_rank`: its parent has the same environment."""
    command = [sys.executable, "-c", ASK]
    if through_a_rank:
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command})"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **child_environment}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


@pytest.mark.parametrize(
    ("environment", "through_a_rank", "launched"),
    [({}, False, False), (PLACE, False, False), (BY_AGENT, False, True), (BY_AGENT, True, False)],
)
def test_only_what_torchrun_started_itself_is_a_rank(
    environment: dict[str, str], through_a_rank: bool, launched: bool
) -> None:
    assert ask(environment, through_a_rank=through_a_rank) == launched


def test_a_command_of_one_process_forgets_a_rank_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    assert not forget_rank()
    for name, value in {**BY_AGENT, "TORCHTITAN_CP_JOB_NOTES": "/tmp/notes"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANKING", "mine")
    assert forget_rank()
    assert dict(os.environ) == {**before, "RANKING": "mine"}
    assert not is_launched()


def test_a_launcher_is_the_one_that_says_so_or_torchrun_and_a_shell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert launcher_pid() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_pid() == os.getppid()
    monkeypatch.setenv("TORCHTITAN_CP_LAUNCHER", "12")
    assert launcher_pid() == 12


def test_a_process_has_ended_when_it_is_killed_though_nobody_has_waited_for_it() -> None:
    assert not has_ended(os.getppid())
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    assert not has_ended(child.pid)
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(child.pid), "a stopped one may go on"
    child.kill()
    while not has_ended(child.pid):
        time.sleep(0.01)
    child.wait()
    assert has_ended(child.pid)
