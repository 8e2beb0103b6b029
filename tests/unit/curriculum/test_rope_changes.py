"""Every change of the rotary embedding between stages is said, and every longer stage that changes nothing."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import ARCHITECTURES
from tests.support.hub_models import write_start
from tests.support.huggingface_families import FAMILIES
from tests.support.ropes import draw
from tests.support.runs import TINY, write_run
from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.config.names import ROPE_KINDS
from torchtitan_cp.config.sections import Curriculum, Model, Rope, Stage
from torchtitan_cp.curriculum import resolve_stages, rope_notes
from torchtitan_cp.training.registry import model_args_of, register, start_config
from torchtitan_cp.training.resolve import resolve_run
from torchtitan_cp.training.rope_log import log_rope_notes

YARN = Rope(kind="yarn", factor=8.0, original_seq_len=4096)
LONGROPE = Rope(kind="longrope", factor=4.0, original_seq_len=4096, long_factor=(2.0, 3.0), short_factor=(1.0, 1.0))


def said(*stages: tuple[int, Rope | None], own: Rope | None = None, **known: int) -> list[str]:
    """The notes on stages of these lengths; a `!` ahead of those that warn."""
    made = tuple(Stage(seq_len=length, steps=1, global_batch_tokens=length, rope=rope) for length, rope in stages)
    notes = rope_notes(resolve_stages(Config(curriculum=Curriculum(made)), 1), own, **known)
    return ["!" * note.warns + note.text for note in notes]


def test_a_change_is_said_key_by_key_against_the_stage_before() -> None:
    assert said((512, Rope(2e4)), (512, Rope(1e4)), (512, Rope(1e4))) == [
        "stage 2 changes the RoPE of stage 1: theta 20000 -> 10000"
    ]
    assert said((4096, None), (32768, YARN), (65536, replace(YARN, factor=16.0, truncate=False)), own=Rope()) == [
        "stage 2 changes the RoPE of stage 1: kind none -> yarn, factor 1 -> 8, original_seq_len 0 -> 4096",
        "stage 3 changes the RoPE of stage 2: factor 8 -> 16, truncate True -> False",
    ]
    assert said((8192, LONGROPE), (8192, replace(LONGROPE, long_factor=(2.0, 4.0)))) == [
        "stage 2 changes the RoPE of stage 1: long_factor 2 numbers -> 2 numbers"
    ]
    assert said((512, None), (512, Rope(1e4)), (512, None)) == [
        "stage 2 changes the RoPE of stage 1: the model's own -> another",
        "stage 3 changes the RoPE of stage 2: another -> the model's own",
    ], "own is one that no stage can have"


def test_a_longer_stage_with_unchanged_rope_is_said() -> None:
    assert said((4096, None), own=Rope(), trained_tokens=512) == [
        "!stage 1 has 4096 tokens, trained to 512, with unchanged RoPE"
    ]
    assert said((4096, Rope()), (2048, Rope()), (8192, Rope())) == [
        "!stage 3 has 8192 tokens, trained to 4096, with unchanged RoPE"
    ], "fresh weights have no trained length"
    assert said((512, None), (1024, Rope(1e6)), own=Rope(), trained_tokens=4096) == [
        "stage 2 changes the RoPE of stage 1: theta 10000 -> 1e+06"
    ]
    # Scalings that were made for the length warn of nothing.
    assert said((8192, YARN), (32768, YARN), (65536, YARN)) == [
        "stage 2 has 32768 tokens, trained to 8192, with unchanged RoPE",
        "!stage 3 has 65536 tokens, trained to 32768, with unchanged RoPE",
    ]
    linear = Rope(kind="linear", factor=4.0)
    assert said((512, Rope()), (1024, linear), (2048, linear), (4096, linear))[1:] == [
        "stage 3 has 2048 tokens, trained to 1024, with unchanged RoPE",
        "!stage 4 has 4096 tokens, trained to 2048, with unchanged RoPE",
    ]
    assert said((4096, LONGROPE), (8192, LONGROPE)) == [
        "stage 2 changes the RoPE of stage 1: short_factor -> long_factor"
    ]


def test_where_all_attention_has_a_window_that_was_trained_no_distance_is_new() -> None:
    assert not said((4096, None), own=Rope(), trained_tokens=512, span_tokens=512)
    assert said((4096, None), own=Rope(), trained_tokens=512, span_tokens=1024)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_curricula_say_each_step_once(seed: int) -> None:
    generator = random.Random(seed)
    ropes = [draw(generator.choice(ROPE_KINDS), generator, 16)[0] for _ in range(3)]
    drawn = [(2 ** generator.randint(15, 19), generator.choice(ropes)) for _ in range(6)]
    stages: Any = [SimpleNamespace(index=i, seq_len=length, rope=rope) for i, (length, rope) in enumerate(drawn)]
    found = {note.stage: note.text for note in rope_notes(stages, None)}
    for index in range(1, 6):
        (_, before), (length, rope) = drawn[index - 1 : index + 1]
        longest = max(earlier for earlier, _ in drawn[:index])
        if rope != before:
            assert "changes the RoPE" in found[index]
            assert (f"theta {before.theta:g} -> {rope.theta:g}" in found[index]) == (before.theta != rope.theta)
        elif length > longest:
            assert f"{length} tokens, trained to {longest}, with unchanged RoPE" in found[index]
        else:
            assert index not in found


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


def test_the_models_own_theta_is_its_familys_where_config_json_has_none(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["Mixtral"]))
    model = Model(architecture="huggingface", config=str(tmp_path))
    assert "rope_theta" not in FAMILIES["Mixtral"]
    assert hub_rope(start_config(model, model_args_of(model))) == Rope(1e6)
