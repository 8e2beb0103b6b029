"""From the stream to each rank's share of a step: by the cursor alone, every token once."""

import numpy as np
import pytest
import torch

from torchtitan_cp.attention import make_plan
from torchtitan_cp.data.loader import MicroBatch, StepShape, read_step, read_steps

SEQ_LEN = 32


class Counting:
    """A stream whose token at each place is that place; it fails at `broken_at`."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at = broken_at

    def sequence(self, cursor: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if self.broken_at is not None and cursor >= self.broken_at:
            raise OSError("the disk is gone")
        tokens = np.arange(cursor, cursor + seq_len + 1)
        return tokens[:-1], tokens[1:]


def shape_of(dp_rank: int = 0, dp: int = 1, cp_rank: int = 0, cp: int = 1, layout: str = "zigzag") -> StepShape:
    plan = make_plan(SEQ_LEN, ranks=cp, rank=cp_rank, layout=layout)
    return StepShape(SEQ_LEN, micro_batches=3, micro_batch_sequences=2, dp=dp, dp_rank=dp_rank, plan=plan)


def tokens_of(step: tuple[MicroBatch, ...]) -> list[int]:
    return torch.cat([batch.tokens.flatten() for batch in step]).tolist()


@pytest.mark.parametrize(
    ("dp", "cp", "layout"), [(1, 1, "zigzag"), (2, 1, "zigzag"), (2, 4, "zigzag"), (1, 2, "balanced")]
)
def test_the_ranks_of_a_step_hold_each_of_its_tokens_once(dp: int, cp: int, layout: str) -> None:
    shapes = [shape_of(dp_rank, dp, cp_rank, cp, layout) for dp_rank in range(dp) for cp_rank in range(cp)]
    held = [token for shape in shapes for token in tokens_of(read_step(Counting(), 1000, shape))]
    assert sorted(held) == list(range(1000, 1000 + shapes[0].tokens))


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_step_holds_the_same_sequences_however_many_ranks_share_it(dp: int) -> None:
    shapes = [shape_of(rank, dp) for rank in range(dp)]
    per_micro_batch = [
        sorted(start for shape in shapes for start in read_step(Counting(), 0, shape)[index].tokens[:, 0].tolist())
        for index in range(3)
    ]
    rows = 2 * dp
    assert per_micro_batch == [[(index * rows + row) * SEQ_LEN for row in range(rows)] for index in range(3)], (
        "micro-batch i of all ranks together is the i-th stretch of the step"
    )


def test_labels_are_the_next_tokens_and_positions_the_places_in_the_sequence() -> None:
    for cp_rank in range(2):
        for batch in read_step(Counting(), 64, shape_of(cp_rank=cp_rank, cp=2)):
            assert torch.equal(batch.labels, batch.tokens + 1), "the label of a chunk's last token is in the next chunk"
            assert torch.equal(batch.positions, batch.plan.positions)
            assert torch.equal(batch.tokens % SEQ_LEN, batch.positions.expand(2, -1))


def test_reading_ahead_gives_the_steps_in_order_and_goes_on_from_any_cursor() -> None:
    shape = shape_of(1, 2)
    run = [tokens_of(step) for step in read_steps(Counting(), 0, 5, shape, read_ahead=2, pin=False)]
    assert run == [tokens_of(read_step(Counting(), index * shape.tokens, shape)) for index in range(5)]
    resumed = read_steps(Counting(), 2 * shape.tokens, 3, shape, read_ahead=3, pin=False)
    assert [tokens_of(step) for step in resumed] == run[2:]


def test_an_error_of_the_reading_thread_reaches_the_one_who_waits() -> None:
    shape = shape_of()
    steps = read_steps(Counting(broken_at=shape.tokens), 0, 3, shape, read_ahead=2, pin=False)
    with pytest.raises(OSError, match="the disk is gone"):
        list(steps)
