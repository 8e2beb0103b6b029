"""Rows of a comparison: what equals, what differs and by how much, and what is missing."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from torchtitan_cp.attention.comparison import LOSS, ModelRun, Trace, by_layer, compare, describe_peaks, record_step

OUTPUT = ("layers.0", "output")


def test_a_row_has_the_relative_and_the_largest_difference_and_what_is_allowed() -> None:
    want = {LOSS: torch.tensor(2.0), OUTPUT: torch.tensor([3.0, 4.0])}
    got = {OUTPUT: torch.tensor([3.0, 4.5]), LOSS: torch.tensor(2.0)}
    rows = compare(got, want, 0.05, {LOSS: torch.tensor(2.01), OUTPUT: torch.tensor([3.0, 4.4])})
    assert [row.quantity for row in rows.values()] == ["loss", "output, layers.0"], "in the order of one process"
    assert (rows[LOSS].difference, rows[LOSS].allowed) == (0.0, 0.05)
    assert (rows[OUTPUT].difference, rows[OUTPUT].largest) == (0.1, 0.125)
    assert rows[OUTPUT].allowed == pytest.approx(1.5 * 0.4 / 5), "one and a half times what rounding changes"
    assert rows[LOSS].holds
    assert rows[OUTPUT].holds
    assert not compare(got, want, 0.09)[OUTPUT].holds


@pytest.mark.parametrize("got", [{}, {OUTPUT: torch.ones(3)}, {OUTPUT: torch.tensor([1.0, math.nan])}])
def test_what_is_missing_of_another_shape_or_not_a_number_never_holds(got: dict[tuple[str, str], Tensor]) -> None:
    row = compare(got, {OUTPUT: torch.ones(2)}, 1e9)[OUTPUT]
    assert (row.difference, row.largest, row.holds) == (math.inf, math.inf, False)


def test_zeros_that_equal_zeros_hold() -> None:
    row = compare({OUTPUT: torch.zeros(2)}, {OUTPUT: torch.zeros(2)}, 0.0)[OUTPUT]
    assert (row.difference, row.largest, row.holds) == (0.0, 0.0, True)


def test_gradients_of_a_layer_are_one_vector() -> None:
    names = ("model.embed.weight", "model.layers.1.mlp.up", "model.layers.1.norm", "model.layers.11.norm", "scale")
    layers = by_layer({name: torch.full((2, 1), float(number)) for number, name in enumerate(names)})
    assert {layer: vector.tolist() for layer, vector in layers.items()} == {
        "model": [0, 0],
        "model.layers.1": [1, 1, 2, 2],
        "model.layers.11": [3, 3],
        "scale": [4, 4],
    }


@contextmanager
def record_weight(parts: Sequence[nn.Module]) -> Iterator[Trace]:
    trace = Trace()
    yield trace
    trace.events[OUTPUT] = next(parts[0].parameters()).detach().double()


def test_a_step_is_recorded_with_its_loss_memory_and_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)

    def step(changed: int | None) -> Tensor:
        loss = model(torch.full((2,), 1.0 if changed is None else 2.0)).sum()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    def gradients() -> dict[str, Tensor]:
        assert model.weight.grad is not None
        return {"weight": model.weight.grad}

    run = ModelRun([model], step, gradients, lambda: lambda: 5 * 2**20)
    trace = record_step(run, record_weight)
    assert (trace.loss, trace.peak_bytes) == (model.weight.sum().item(), 5 * 2**20)
    assert trace.events[OUTPUT].dtype == torch.float32
    assert trace.gradients["weight"].tolist() == [1, 1]
    assert [*trace.quantities] == [LOSS, OUTPUT, ("weight", "gradients")]
    with torch.no_grad():
        changed = record_step(run, record_weight, changed=0)
    assert (changed.loss, changed.gradients) == (2 * trace.loss, {})


def test_the_line_on_memory() -> None:
    assert describe_peaks(5 << 20, 1500 << 20) == "peak memory of the step: 5 MiB on one process, 1,500 MiB a rank"
