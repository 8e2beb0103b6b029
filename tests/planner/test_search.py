"""What the search finds fits, is no slower than what it was given, and says why."""

from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.runs import write_run
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.planner.__main__ import main
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.plan import plan_config
from torchtitan_cp.planner.search import search
from torchtitan_cp.registry import register

OPTIONS = ["--curriculum.stages[0].seq_len=8192", "--curriculum.stages[0].global_batch_tokens=65536"]


def test_the_best_layout_fits_and_is_no_slower_than_the_given_one(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    config = load_config(write_run(tmp_path), [*OPTIONS, "--parallel.tp=2", "--activation.checkpoint=full"])
    cluster = make_cluster("h100-80g", 1, 4)
    found = search(config, cluster)
    assert all(estimate.fits for estimate in found.estimates)
    given, chosen = (sum(e.step_seconds for e in plan_config(c, cluster)) for c in (config, found.config))
    assert chosen <= given
    assert chosen == pytest.approx(sum(estimate.step_seconds for estimate in found.estimates))
    assert [reason.split(" ")[0] for reason in found.reasons] == [
        "parallel.tp", "parallel.pp", "activation.checkpoint", "8K:",
    ]  # fmt: skip


def test_the_written_file_plans_as_the_search_said_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = write_run(tmp_path), tmp_path / "found.toml"
    arguments = [str(path), *OPTIONS, "--device", "cpu", "--search", "--write", str(written)]
    assert main(arguments) == 0
    assert "micro-batches; cp" in capsys.readouterr().out
    config = load_config(written)
    assert plan_config(config, make_cluster("cpu"))[0].fits
    assert main(arguments) == 2
    assert "File exists\n  fix: give the path of a new file" in capsys.readouterr().err


def test_what_cannot_fit_is_said(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    config = load_config(write_run(tmp_path), [*OPTIONS, "--model.flavor=405B", "--model.overrides={}"])
    with pytest.raises(ConfigError, match="nothing fits on 2 x cpu"):
        search(config, make_cluster("cpu"))
