"""Step 0 of a run is evaluated, and a checkpoint in Hugging Face's format is evaluated as it is."""

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.hub_models import PLAIN, write_start
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, write_run
from torchtitan_cp.cli.evaluate import main

AT_START = ("--evaluation.at_start=true", "--evaluation.max_share=0.9", "--curriculum.stages[0].steps=2")


def lines_and_log(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """On a rank: train; the lines of evaluation.jsonl, and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = prepared(path, *AT_START, *overrides)
        trainer.run()
    dist.barrier()
    lines = (trainer.folder / "evaluation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], said.getvalue()


def evaluator_log(path: Path, *overrides: str) -> list[str]:
    """On a rank: train; the lines that the evaluator logs."""
    logger, said = logging.getLogger("torchtitan_cp.training.evaluator"), io.StringIO()
    level, handler = logger.level, logging.StreamHandler(said)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        lines_and_log(path, *overrides)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return said.getvalue().splitlines()


def evaluate_command(*words: str) -> tuple[int, str]:
    """On a rank: exit code and what was printed."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(said),
        patch("torchtitan_cp.cli.evaluate.stop_ranks"),
    ):
        code = main([*words])
    return code, said.getvalue()


def test_step_0_is_evaluated_and_later_evaluations_say_what_changed(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    lines, said = ranks(2)(lines_and_log, write_run(tmp_path, TINY))[0]
    before, after = lines
    assert (before["step"], after["step"]) == (0, 2)
    assert before["loss"] == pytest.approx(5.55, abs=0.1), "ln 257: fresh weights know nothing"
    assert before["since_start"] is None
    change = after["loss"] - before["loss"]
    assert change < 0
    assert after["since_start"]["loss"] == pytest.approx(change)
    assert f"since step 0: loss {change:+.4f}\n" in said
    assert f"on held-out text, {before['loss']:.4f} at step 0; a unigram model" in said


@pytest.mark.parametrize("override", ["--evaluation.at_start=false", "--evaluation.max_share=0.0001"])
def test_without_the_key_or_the_time_step_0_is_not_evaluated(
    ranks: Callable[[int], RankPool], tmp_path: Path, override: str
) -> None:
    lines, said = ranks(1)(lines_and_log, write_run(tmp_path, TINY), override)[0]
    assert [line["step"] for line in lines] == [2]
    assert lines[0]["since_start"] is None
    assert "step 0" not in said


def test_evaluations_that_are_skipped_for_lack_of_time_are_named_once_a_stage(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    settings = ("--evaluation.interval=1", "--evaluation.max_share=0.0001", "--curriculum.stages[0].steps=5")
    before, within = ranks(1)(evaluator_log, write_run(tmp_path, TINY), *settings)[0]
    share = r"half of evaluation\.max_share = 0\.0001, where [\d.]+ would have included it"
    assert re.fullmatch(rf"no evaluation before the first step: those before a stage's end may take {share}", before)
    assert re.fullmatch(rf"no evaluation after step 2: those before a stage's end may take {share}", within)


def test_step_0_of_a_run_from_published_weights_is_what_the_command_finds_in_them(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_start(tmp_path / "from", "llama, tied")
    lines, _ = ranks(1)(lines_and_log, path, *PLAIN)[0]
    hub = str(tmp_path / "from" / "hub")
    options = ("--config", str(path), "--trials", "1", "--out", str(tmp_path / "out"))
    code, said = ranks(1)(evaluate_command, hub, *options)[0]
    assert code == 0, said
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(lines[0]["loss"], rel=1e-5)
    assert found["checkpoint"] == hub
    assert "validation at step 0: loss " in said


def test_a_config_is_refused_beside_a_run(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_run(tmp_path, TINY)
    code, said = ranks(1)(evaluate_command, str(tmp_path), "--config", str(path))[0]
    assert code == 2
    assert said.startswith(
        f"error: --config is for a checkpoint in Hugging Face's format, and {tmp_path} is none\n  fix: "
    )
