"""`torchtitan-cp check` and `plan` start fast: they wait for nothing that only ranks need."""

import subprocess
import sys

import pytest


@pytest.mark.deep
@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_config_is_checked_and_planned_without_what_takes_a_second_to_import(command: str) -> None:
    code = f"import sys, torchtitan_cp.cli.{command}; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
