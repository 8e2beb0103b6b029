"""`torchtitan-cp check` and `plan` start fast: they wait for nothing that only ranks need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.texts import REPOSITORY


@pytest.mark.deep
@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_config_is_checked_and_planned_without_what_takes_a_second_to_import(command: str) -> None:
    code = f"import sys, torchtitan_cp.cli.{command}; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_folder_models_in_the_current_directory_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").touch()
    code = "import torchtitan_cp.cli, importlib.util; print(importlib.util.find_spec('models').origin)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(REPOSITORY / "models/__init__.py")
