"""The first number that is not finite, among all that follow from it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtitan_cp.health.diagnosis import (
    Event,
    ModuleTrace,
    find_invalid_tokens,
    find_nonfinite_weight,
    find_origin,
    largest_value,
)
from torchtitan_cp.health.replay import Bundle, pack_arguments


class Inner(nn.Module):
    """Two linears with a product between them, which no module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) * self.scale).square())


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.RMSNorm(4), Inner(), nn.Linear(4, 2)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        inner = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        return self.last(x + inner)


def measured(net: nn.Module, *inputs: Tensor) -> ModuleTrace:
    trace = ModuleTrace([(0, "", net)])
    with trace.watching():
        for x in inputs:
            net(x).square().sum().backward()
    return trace


def traced(net: nn.Module, *inputs: Tensor) -> Event | None:
    origin = find_origin([measured(net, *inputs).growth_over(ModuleTrace([]))])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    return origin and origin[1]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (lambda net: None, None),
        (lambda net: net.inner.up.weight.data.mul_(1e37), ("forward", "inner.down", "input", "inner")),
        (lambda net: setattr(net.inner, "scale", math.nan), ("forward", "inner.down", "input", "inner")),
        (lambda net: net.norm.weight.data.mul_(1e39), ("forward", "norm", "output", "norm")),
        (lambda net: net.last.bias.data.fill_(math.inf), ("forward", "last", "output", "last")),
        (lambda net: net.last.weight.data.mul_(1e30), ("backward", "last", "input gradient", "last")),
    ],
    ids=["healthy", "overflow between modules", "nan between modules", "norm", "bias", "gradient alone"],
)
def test_the_first_is_named_whether_blocks_are_recomputed_or_not(
    corrupt: object, named: tuple[str, ...] | None, recompute: bool
) -> None:
    torch.manual_seed(3)
    net = Net(recompute)
    corrupt(net)  # type: ignore[operator]
    # With a last weight of 1e30 the outputs are finite, and the gradient that goes on from there is not.
    event = traced(net, torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    assert (event and (event.direction, event.module, event.quantity, event.culprit_module)) == named
    assert event is None or event.micro_batch == 0


def test_the_gradient_of_a_tensor_between_two_modules_is_the_later_ones_doing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
    net[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.nan,))
    event = traced(net, torch.randn(2, 3, 4))
    assert event is not None
    assert (event.direction, event.module, event.quantity, event.culprit_module) == (
        "backward",
        "1",
        "input gradient",
        "1",
    )


def test_a_weights_own_gradient_is_an_event_of_its_module() -> None:
    net = Net()
    net.inner.up.weight.register_hook(lambda gradient: gradient * math.inf)
    event = traced(net, torch.randn(2, 5, 4))
    assert event is not None
    assert (event.module, event.quantity, event.culprit_module) == ("inner.up", "gradient of weight", "inner.up")


def test_micro_batches_are_told_apart_and_the_first_bad_one_is_named() -> None:
    x = torch.randn(2, 5, 4)
    bad = x.clone()
    bad[1, 3, 2] = math.nan
    event = traced(Net(), x, x, bad)
    assert event is not None
    assert (event.micro_batch, event.quantity, event.value, event.shape) == (2, "input", "nan", (2, 5, 4))
    assert event.index == (1, 3, 2)


def event_at(*order: int) -> Event:
    return Event(order, 0, "forward", "layers.0", "output", "nan", (1,), (0,))


def test_the_smallest_place_in_the_order_wins_and_ranks_that_share_it_are_all_named() -> None:
    late, early = (math.inf, event_at(2, 0, 0, 0, 9)), (math.inf, event_at(2, 0, 0, 0, 4))
    assert find_origin([[], [late], [early], [], [early]]) == (*early, [2, 4])
    assert find_origin([[], []]) is None
    weight = (math.inf, replace(event_at(0, 5), module="norm"))
    assert find_origin([[early], [weight]]) == (*weight, [1])


def test_a_weight_and_an_id_that_is_no_token_are_found() -> None:
    net = Net()
    assert find_nonfinite_weight([net]) is None
    net.inner.down.weight.data[3, 5] = -math.inf
    event = find_nonfinite_weight([net])
    assert event is not None
    assert (event.module, event.quantity, event.value, event.index) == (
        "inner.down",
        "parameter weight",
        "-inf",
        (3, 5),
    )
    tokens = torch.tensor([[1, 2, 3]])
    good = {"tokens": tokens, "labels": torch.tensor([[2, 3, -100]])}
    assert find_invalid_tokens([good], 4) is None
    for name, ids in (("labels", [[2, 4, -100]]), ("tokens", [[1, -100, 3]]), ("labels", [[-1, 3, 3]])):
        event = find_invalid_tokens([good, good | {name: torch.tensor(ids)}], 4)
        assert event is not None
        assert (event.micro_batch, event.quantity) == (1, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_value_of_a_tensor_is_found_and_of_nonfinite_ones_the_first_as_it_lies(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5).to(dtype)
    x[1, 2, 3] = -64.0
    assert largest_value(x) == (64.0, "64", (3, 4, 5), (1, 2, 3))
    assert largest_value(torch.empty(0, 3)) is None
    x[2, 0, 0], x[1, 3, 4] = math.nan, math.inf
    assert largest_value(x) == (math.inf, "inf", (3, 4, 5), (1, 3, 4))


def test_a_capture_keeps_one_micro_batchs_inputs_and_the_gradient_that_comes_back() -> None:
    net, batches = Net(recompute=True), [torch.randn(2, 5, 4) for _ in range(3)]
    capture = ModuleTrace([(0, "", net)], keep=(net.inner, 1))
    with capture.watching():
        for x in batches:
            net(x).sum().backward()
    assert len(capture.inputs) == 1
    torch.testing.assert_close(capture.inputs[0], net.norm(batches[1]))
    expected = torch.ones(2, 5, 2) @ net.last.weight
    torch.testing.assert_close(capture.output_gradients[0], expected)


def test_a_bundle_is_json_and_safetensors_and_comes_back(tmp_path: Path) -> None:
    inputs = [torch.randn(2, 3), None, {0: object()}, torch.arange(4)]
    described, tensors = pack_arguments(inputs, lambda x: x + 1)
    assert described == ["input.0", None, "plans", "input.1"]
    Bundle(
        {"summary": "", "module": None, "arguments": described, "step": 3},
        tensors | {"weight.w1.weight": torch.eye(3)[:, 1:]},
    ).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "tensors.safetensors"]
    assert json.loads((tmp_path / "report.json").read_text())["step"] == 3
    bundle = Bundle.read(tmp_path)
    assert torch.equal(bundle.tensors["input.1"], torch.arange(4) + 1)
    assert bundle.under("weight.").keys() == {"w1.weight"}


def test_what_outgrew_a_healthy_step_first_is_where_a_spike_arises() -> None:
    torch.manual_seed(0)
    net, healthy, other = Net(), torch.randn(5, 4), torch.randn(5, 4)
    usual = measured(net, healthy, other)
    assert any(value > 0 and event.location == ("forward", "inner.up", "output") for value, event in usual.observed)
    assert find_origin([measured(net, other, healthy).growth_over(usual)]) is None, (
        "steps differ, and nothing stands out"
    )
    net.inner.scale = 1000.0
    found = find_origin([[], measured(net, other, healthy).growth_over(usual)])
    assert found is not None
    times, event, ranks = found
    assert (event.module, event.quantity, event.direction, event.micro_batch) == ("inner.down", "input", "forward", 0)
    assert (event.culprit_module, ranks) == ("inner", [1])
    assert 1e5 < times < 1e7, "the square of a thousand, as far as two texts are alike"


def test_of_two_ranks_the_one_where_it_arises_is_named() -> None:
    def event(place: int, module: str) -> Event:
        return Event((2, 0, 0, 0, place), 0, "forward", module, "output", "1", (1,), (0,))

    arises = [(1.1, event(1, "a")), (900.0, event(2, "b"))]
    follows = [(1.2, event(1, "a")), (2000.0, event(3, "c"))]
    assert find_origin([follows, arises]) == (900.0, event(2, "b"), [1])
    assert find_origin([[], []]) is None
