"""Models of transformers through three lengths and rotary embeddings, killed, and resumed on other ranks."""

import random
from pathlib import Path

import pytest

from tests.support.huggingface_parity import write_family
from tests.support.jobs import ForkedJob, Kill, kill_at, lines_of
from tests.support.runs import losses

pytestmark = [pytest.mark.jobs, pytest.mark.deep]

STEPS_A_STAGE = 4
STAGE_ENDS = (STEPS_A_STAGE, 2 * STEPS_A_STAGE)
STAGES = """cp = 1

[[curriculum.stages]]
seq_len = {lengths[1]}
steps = 4
global_batch_tokens = {tokens[1]}
cp = {cp}
{middle}
data = {{{{document_mask = true, restart_positions = true, packing = "best_fit", packing_window = 8}}}}

[[curriculum.stages]]
seq_len = {lengths[2]}
steps = 4
global_batch_tokens = {tokens[2]}
cp = {cp}
strategy = "all_to_all"
{last}

[checkpoint]
interval = 2
"""
ROPES = {
    "Gemma 3": ('theta = 1e6, kind = "linear", factor = 4.0', 'theta = 1e6, kind = "linear", factor = 8.0'),
    "gpt-oss": (
        'theta = 150000.0, kind = "yarn", factor = 4.0, original_seq_len = 64, truncate = false',
        'theta = 150000.0, kind = "yarn", factor = 8.0, original_seq_len = 64, truncate = false',
    ),
}
# Without rotary embeddings; of two ranks, then on four.
HYBRIDS = ("Nemotron-H", "Kimi Linear")


@pytest.mark.parametrize("family", [*ROPES, *HYBRIDS])
def test_a_curriculum_killed_and_resumed_on_other_ranks_has_the_losses_of_one_that_was_not(
    family: str, tmp_path: Path
) -> None:
    lengths, tokens, cp = ((512, 2048, 4096), (2048, 4096, 8192), 2)
    ropes = ("", "")
    if family in ROPES:
        lengths, tokens, cp = ((128, 256, 512), (512, 512, 1024), -1)
        ropes = tuple(f"rope = {{{{{rope}}}}}" for rope in ROPES[family])
    stages = STAGES.format(middle=ropes[0], last=ropes[1], lengths=lengths, tokens=tokens, cp=cp)
    path = write_family(tmp_path, family, stages)
    first = {"steps": STEPS_A_STAGE, "seq_len": lengths[0], "global_batch_tokens": tokens[0]}
    command = [f"--curriculum.stages[0].{key}={value}" for key, value in first.items()]
    whole, folder = tmp_path / "undisturbed", tmp_path / "killed"
    job = ForkedJob(2, path, f"--job.dump_folder={whole}", *command)
    assert job.wait() == [0, 0], job.log.read_text()

    draw = random.Random(0)
    kills = [(2, Kill(STAGE_ENDS[0], "transition")), (1 if family in ROPES else 2, Kill(STAGE_ENDS[0] + 2, "step"))]
    for size, kill in kills:
        job = ForkedJob(size, path, f"--job.dump_folder={folder}", *command)
        try:
            assert kill_at(job, kill, folder, STAGE_ENDS, draw, size), job.log.read_text()
        finally:
            job.end()
    job = ForkedJob(4, path, f"--job.dump_folder={folder}", *command)
    assert job.wait() == [0] * 4, job.log.read_text()

    wanted, lines = losses(lines_of(whole)), lines_of(folder)
    assert [line["step"] for line in lines] == list(range(1, 3 * STEPS_A_STAGE + 1))
    assert losses(lines) == pytest.approx(wanted, rel=1e-4)
