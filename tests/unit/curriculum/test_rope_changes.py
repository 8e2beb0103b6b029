"""Every change of the rotary embedding between stages is said, and every longer stage that changes nothing."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ropes import draw
from torchtitan_cp.config import Config
from torchtitan_cp.config.names import ROPE_KINDS
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Curriculum, Stage
from torchtitan_cp.curriculum import resolve_stages, rope_notes

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
