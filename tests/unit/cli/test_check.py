"""`torchtitan-cp check` and `plan` start fast: they wait for nothing that only ranks need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.huggingface_families import FAMILIES
from tests.support.runs import EXPERTS, TINY, write_run
from tests.support.texts import REPOSITORY
from torchtitan_cp.cli import check
from torchtitan_cp.cli.options import default_ranks
from torchtitan_cp.runtime.device import Device


@pytest.mark.deep
@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_config_is_checked_and_planned_without_what_takes_a_second_to_import(command: str) -> None:
    code = f"import sys, torchtitan_cp.cli.{command}; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("size", "ranks"),
    [
        (["--ranks", "8"], 8),
        (["--nodes", "2", "--gpus-per-node", "4"], 8),
        (["--gpus-per-node", "4"], 4),
        (["--nodes", "3"], 3 * default_ranks()),
        ([], default_ranks()),
    ],
)
def test_ranks_are_said_in_one_way_and_by_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: list[str], ranks: int
) -> None:
    assert check.main([str(write_run(tmp_path)), "--curriculum.stages[0].global_batch_tokens=3072", *size]) == 0
    assert f"20 steps on {ranks} ranks" in capsys.readouterr().out


MODEL = TINY[TINY.index("[model]") : TINY.index("[tokenizer]")]
SHARES_WEIGHTS = TINY.replace(MODEL, '[model]\narchitecture = "huggingface"\nconfig = "{folder}/config.json"\n')


@pytest.mark.parametrize(
    ("device", "config", "says"),
    [
        ("cpu", TINY, "128 (cp 1); not compiled, loss in chunks of 40 tokens"),
        ("cuda", TINY, "128 (cp 1); compiled, loss in chunks of 40 tokens"),
        ("cuda", EXPERTS, "128 (cp 1); compiled, loss in chunks of 40 tokens"),
        (
            "cuda",
            SHARES_WEIGHTS,
            "128 (cp 1); not compiled (compile.enable is not supported by this model: its layers ",
        ),
    ],
)
def test_it_is_said_whether_blocks_are_compiled_and_why_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    config: str,
    says: str,
) -> None:
    monkeypatch.setattr(check, "find_device", lambda: Device(torch.device(device), "gloo"))
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Zamba2"]))
    assert check.main([str(write_run(tmp_path, config)), "--ranks", "1"]) == 0
    assert says in capsys.readouterr().out


def test_a_folder_models_in_the_current_directory_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").touch()
    code = "import torchtitan_cp.cli, importlib.util; print(importlib.util.find_spec('models').origin)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(REPOSITORY / "models/__init__.py")


@pytest.mark.parametrize(
    ("rope", "told"), [("{}", False), ('{kind = "yarn", factor = 4, original_seq_len = 64}', True)]
)
def test_a_rope_that_an_export_refuses_is_told_of_before_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rope: str, told: bool
) -> None:
    """transformers' Phi-3 takes no rotary embedding but longrope."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Phi-3, longrope"]))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\narchitecture = "huggingface"\nhub_checkpoint = "{tmp_path}"\nload_weights = false\n'
        f'[tokenizer]\nkind = "bytes"\n[data]\nsource = "text"\npath = "{__file__}"\n'
        f"[[curriculum.stages]]\nseq_len = 128\nsteps = 2\nglobal_batch_tokens = 128\nrope = {rope}\n"
    )
    assert check.main([str(config), "--ranks", "1"]) == 0
    assert ("curriculum.stages[0] trains, but cannot be exported" in caplog.text) == told
