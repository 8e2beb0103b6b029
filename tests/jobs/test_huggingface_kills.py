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
seq_len = 256
steps = 4
global_batch_tokens = 512
cp = -1
rope = {{{{{middle}}}}}
data = {{{{document_mask = true, restart_positions = true, packing = "best_fit", packing_window = 8}}}}

[[curriculum.stages]]
seq_len = 512
steps = 4
global_batch_tokens = 1024
cp = -1
strategy = "all_to_all"
rope = {{{{{last}}}}}

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


@pytest.mark.parametrize("family", ROPES)
def test_a_curriculum_killed_and_resumed_on_other_ranks_has_the_losses_of_one_that_was_not(
    family: str, tmp_path: Path
) -> None:
    middle, last = ROPES[family]
    path = write_family(tmp_path, family, STAGES.format(middle=middle, last=last))
    command = (f"--curriculum.stages[0].steps={STEPS_A_STAGE}", "--curriculum.stages[0].global_batch_tokens=512")
    whole, folder = tmp_path / "undisturbed", tmp_path / "killed"
    job = ForkedJob(2, path, f"--job.dump_folder={whole}", *command)
    assert job.wait() == [0, 0], job.log.read_text()

    draw = random.Random(0)
    kills = [(2, Kill(STAGE_ENDS[0], "transition")), (1, Kill(STAGE_ENDS[0] + 2, "step"))]
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
