"""Stages: arithmetic against numbers worked out by hand."""

from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Curriculum, Stage, Training
from torchtitan_cp.curriculum import resolve_stages, stage_of

STAGES = (
    Stage(seq_len=1024, steps=10, global_batch_tokens=16384, cp=1),
    Stage(seq_len=2048, tokens=100_000, global_batch_tokens=16384, cp=-1, name="long"),
)


def test_stages_follow_each_other_and_tokens_round_up_to_steps() -> None:
    config = Config(curriculum=Curriculum(STAGES), training=Training(micro_batch_sequences=2))
    first, second = resolve_stages(config, Degrees(1, 1, 4, 1, 1))
    assert (first.name, first.first_step, first.last_step, first.cp, first.dp) == ("1K", 0, 10, 1, 4)
    assert first.micro_batches == 16384 // (1024 * 4 * 2)
    assert (second.name, second.first_step, second.steps, second.cp, second.dp) == ("long", 10, 7, 4, 1)
    assert second.micro_batches * second.micro_batch_sequences * second.seq_len * second.dp == 16384


def test_a_step_finds_its_stage_and_a_finished_run_its_last() -> None:
    plans = resolve_stages(Config(curriculum=Curriculum(STAGES)), Degrees(1, 1, 1, 1, 1))
    assert [stage_of(plans, step).index for step in (0, 9, 10, 16, 17, 99)] == [0, 0, 1, 1, 1, 1]
