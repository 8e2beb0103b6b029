"""A run's folder read without its tensors."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.checkpoint.saved_run import complete_checkpoints, read_saved_run
from torchtitan_cp.config import ConfigError

CONFIG = """
[tokenizer]
kind = "sentencepiece"
bos = true
[[curriculum.stages]]
seq_len = 64
steps = 1
global_batch_tokens = 64
[[curriculum.stages]]
seq_len = 128
steps = 1
global_batch_tokens = 128
rope = {theta = 1e4}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in its second stage, whose rope the config has changed since."""
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "tokenizer.model").touch()
    for step in (2, 10):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        losses = {"0": [2.0, 1.0, 1], **({"1": [1.0, 1.0, 1]} if step == 10 else {})}
        progress = Progress(step=step, stage_losses=losses, identity={"model": {"dim": 8}}, ropes={"1": {"theta": 2e6}})
        (folder / "progress.json").write_text(json.dumps(asdict(progress)))
    (tmp_path / "checkpoints" / "step-12.partial").mkdir()
    return tmp_path


def test_a_runs_newest_checkpoint_or_a_given_one_is_read(run: Path) -> None:
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-10"):
        found = read_saved_run(path)
        assert (found.name, found.run_folder, found.stage_index, found.stage.seq_len) == ("step-10", run, 1, 128)
        assert found.stage.rope is not None
        assert found.stage.rope.theta == 2e6
        assert found.sizes == {"dim": 8}
        assert found.config.tokenizer.path == str(run / "tokenizer.model")
    assert read_saved_run(run / "checkpoints" / "step-2").stage.seq_len == 64
    assert [step for step, _ in complete_checkpoints(run / "checkpoints")] == [2, 10]
    assert complete_checkpoints(run / "none") == []


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none is not a checkpoint and contains none"):
        read_saved_run(run / "none")
    (run / "checkpoints" / "step-10" / "progress.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step-10 is damaged: progress.json cannot be read"):
        read_saved_run(run)
    (run / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"step-2 is a checkpoint outside its run: .*config.toml is missing"):
        read_saved_run(run / "checkpoints" / "step-2")
