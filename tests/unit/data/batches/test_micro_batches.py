"""From a stage's samples to each rank's share of a step: by its number alone, every token once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.counting import SEQ_LEN, Counting, batch_layout_of, tokens_of
from torchtitan_cp.attention import Plan
from torchtitan_cp.data.batches import micro_batches
from torchtitan_cp.data.batches.micro_batches import read_step


@pytest.mark.parametrize(
    ("dp", "cp", "layout"), [(1, 1, "zigzag"), (2, 1, "zigzag"), (2, 4, "zigzag"), (1, 2, "balanced")]
)
def test_the_ranks_of_a_step_hold_each_of_its_tokens_once(dp: int, cp: int, layout: str) -> None:
    shapes = [batch_layout_of(dp_rank, dp, cp_rank, cp, layout) for dp_rank in range(dp) for cp_rank in range(cp)]
    held = [token for shape in shapes for token in tokens_of(read_step(Counting(), shape, 7))]
    assert sorted(held) == list(range(7 * shapes[0].tokens, 8 * shapes[0].tokens))


def test_the_thread_that_pins_a_batch_prepares_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Plan] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(micro_batches, "prepare_plan", prepared.append)
    batch = read_step(Counting(), batch_layout_of(), 0)[0]
    batch.pin_memory()
    assert prepared == [batch.plans[0], batch.plans[8]]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_micro_batches_of_all_ranks_carry_like_work(dp: int) -> None:
    steps = [read_step(Counting(), batch_layout_of(rank, dp), 0) for rank in range(dp)]
    assert sorted(number for step in steps for batch in step for number in batch.numbers) == list(range(6 * dp))
    for index in range(3):
        parities = [sorted(number % 2 for number in step[index].numbers) for step in steps]
        assert parities == [parities[0]] * dp, "each rank has as many long documents"


def test_labels_positions_and_plans_are_those_of_the_rows() -> None:
    for cp_rank in range(2):
        for batch in read_step(Counting(), batch_layout_of(cp_rank=cp_rank, cp=2), 1):
            assert torch.equal(batch.labels, batch.tokens + 1), "the label of a chunk's last token is in the next chunk"
            assert batch.plans.keys() == {0, 8}
            assert batch.plans[8].layout == batch.plan.layout
            assert batch.plans[8].mask.window == (7, -1)
            places = batch.tokens % SEQ_LEN
            documents = [Counting().document_lengths(number) for number in batch.numbers]
            if all(row == (SEQ_LEN,) for row in documents):
                assert batch.plan.mask.document_lengths is None
                assert torch.equal(batch.positions, places[0])
            else:
                assert batch.plan.mask.document_lengths == tuple(documents)
                odd = torch.tensor([number % 2 == 1 for number in batch.numbers]).unsqueeze(1)
                assert torch.equal(batch.positions.expand(2, -1), torch.where(odd & (places >= 5), places - 5, places))


def test_every_token_knows_its_place_in_its_document() -> None:
    step = read_step(Counting(), batch_layout_of(cp_rank=1, cp=2, layout="zigzag"), 0)
    for batch in step:
        assert batch.sources == ("numbers",) * len(batch.tokens)
        for row, number in enumerate(batch.numbers):
            places = np.concatenate([np.arange(length) for length in Counting().document_lengths(number)])
            assert batch.document_positions[row].tolist() == places[batch.plan.positions].tolist()


def test_all_tensors_of_a_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read_step(Counting(), batch_layout_of(), 0)[0]
    pinned = list[int]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: (pinned.append(id(x)), x)[1])
    batch.pin_memory()
    assert set(pinned) == {id(value) for value in vars(batch).values() if isinstance(value, torch.Tensor)}
    assert len(pinned) == 4


def test_layers_whose_window_hides_nothing_have_the_plan_of_those_without_one() -> None:
    plans = replace(
        batch_layout_of(), strategies=dict.fromkeys((0, 8, SEQ_LEN - 1, SEQ_LEN, 2 * SEQ_LEN), "ring")
    ).plans()
    assert plans[SEQ_LEN] is plans[2 * SEQ_LEN] is plans[0]
    assert plans[8].mask.window == (7, -1)
    assert plans[SEQ_LEN - 1].mask.window == (SEQ_LEN - 2, -1)


def test_layers_have_plans_with_the_exchange_of_their_window() -> None:
    plans = replace(batch_layout_of(cp=2), strategies={0: "all_to_all", 8: "ring"}).plans()
    assert {window: plan.strategy for window, plan in plans.items()} == {0: "all_to_all", 8: "ring"}
    assert plans[8].layout is plans[0].layout
