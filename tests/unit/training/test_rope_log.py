"""What the log says of a stage's rotary embedding beside the model's own."""

import logging
from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.hub_models import write_start
from tests.support.runs import TINY, write_run
from torchtitan_cp.config import load_config
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run
from torchtitan_cp.training.rope_log import log_rope_notes

TWO_ROPES = """rope = {{theta = 20000.0}}

[[curriculum.stages]]
seq_len = 128
steps = 2
global_batch_tokens = 512
rope = {{kind = "linear", factor = 2.0}}
"""


@pytest.mark.parametrize("start", ["fresh", "llama", "huggingface"])
def test_a_rope_without_theta_takes_the_models_own_and_the_log_says_from_what_to_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start: str
) -> None:
    register(ARCHITECTURES)
    if start == "fresh":
        path, chosen = write_run(tmp_path, TINY + TWO_ROPES), []
    else:
        path = write_start(tmp_path, "llama, tied")
        text = path.read_text()
        path.write_text(text[: text.index("rope = ")] + TWO_ROPES.format())
        chosen = ["--model.flavor=", "--model.overrides={}", f"--model.architecture={start}"]
    run = resolve_run(load_config(path, chosen), 1)
    assert run.stages[1].rope == Rope(1e4, "linear", 2.0)
    with caplog.at_level(logging.INFO, "torchtitan_cp.training.rope_log"):
        log_rope_notes(run.config, run.stages, run.model_args)
        log_rope_notes(run.config, run.stages, run.model_args, first=2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "stage 2 changes the RoPE of stage 1: theta 20000 -> 10000, kind none -> linear, factor 1 -> 2; its rope "
            "has no theta, so it takes the model's own",
        )
    ]


@pytest.mark.parametrize("architecture", ["llama", "huggingface"])
def test_a_stage_longer_than_its_checkpoint_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    register(ARCHITECTURES)
    path = write_start(tmp_path, "llama, tied")
    longer = ["--curriculum.stages[0].seq_len=4096", "--curriculum.stages[0].global_batch_tokens=4096"]
    chosen = [*longer, "--model.flavor=", "--model.overrides={}", f"--model.architecture={architecture}"]
    for more, told in (([], True), (["--model.load_weights=false"], False)):
        caplog.clear()
        run = resolve_run(load_config(path, [*chosen, *more]), 1)
        log_rope_notes(run.config, run.stages, run.model_args)
        wanted = ["stage 1 has 4096 tokens, trained to 512, with unchanged RoPE"]
        assert [record.getMessage() for record in caplog.records] == (wanted if told else [])
