"""A fault strikes where, when and whom it names, and nothing else changes."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.inject import SPIKE, Inject, Injector, fault_in
from tests.support.rank_pool import RankPool
from torchtitan_cp.attention import make_plan
from torchtitan_cp.config import ConfigError
from torchtitan_cp.data.batches.micro_batches import MicroBatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_first = True
        self.tok_embeddings = nn.Embedding(10, 4)
        self.layers = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for n in "01"})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x


def strikes(step: int = 3, again: bool = False, **settings: object) -> dict[str, int]:
    """On a rank: how many values are not finite of the output, of each gradient, and of each weight."""
    torch.manual_seed(0)
    net = Net()
    tokens = torch.arange(8).view(1, 8)
    expected = net(tokens)
    injector = Injector(Inject(step=3, rank=1, **settings), [net], 10, lambda rank: True)  # type: ignore[arg-type]
    with injector.fault(step, again=again):
        out = net(tokens)
        out.sum().backward()
    found = {"output": out} | {f"grad {n}": p.grad for n, p in net.named_parameters()} | dict(net.named_parameters())
    counts = {name: int((~x.isfinite()).sum()) for name, x in found.items()}  # type: ignore[union-attr]
    if not any(counts.values()) and settings.get("kind") != "spike":
        assert torch.equal(out, expected)
    # Nothing is left behind.
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    counts["apart"] = int((out - expected).abs().max() > 100)
    return {name: count for name, count in counts.items() if count}


def test_other_ranks_and_other_steps_and_a_transient_fault_run_again_are_left_alone(
    ranks: Callable[[int], RankPool],
) -> None:
    first, second = ranks(2)(strikes)
    assert first == {}
    assert second["output"] == 4
    assert ranks(2)(strikes, 2) == ranks(2)(strikes, 4) == [{}, {}]
    assert ranks(2)(strikes, 3, True)[1]["output"] == 4


def strike_each() -> dict[str, dict[str, int]]:
    cases = {
        "embedding": {"where": "embedding"},
        "forward": {"where": "forward", "layer": 1, "module": "0"},
        "backward": {"where": "backward", "layer": 1, "module": "2"},
        "gradient": {"where": "gradient", "layer": 1, "module": "2", "kind": "inf"},
        "weight": {"where": "weight", "layer": 0, "module": "2"},
        "spike": {"where": "forward", "layer": 1, "kind": "spike"},
        "transient": {"where": "forward", "transient": True},
    }
    return {name: strikes(again=name == "transient", **case) for name, case in cases.items()}  # type: ignore[arg-type]


def test_each_place_spoils_what_lies_behind_it_and_nothing_before_it(ranks: Callable[[int], RankPool]) -> None:
    clean, struck = ranks(2)(strike_each)
    assert not any(clean.values())
    # One token of the embedding: its output, and the gradients of every weight behind it.
    assert struck["embedding"]["output"] == 4
    assert struck["forward"]["output"] == 4
    # One value of the gradient that the last linear hands to the tanh.
    assert "output" not in struck["backward"]
    assert not any(name.startswith("grad layers.1.2") for name in struck["backward"])
    assert struck["backward"]["grad layers.1.0.weight"] > 0
    assert struck["gradient"] == {"grad layers.1.2.weight": 1}
    assert struck["weight"]["layers.0.2.weight"] == 1
    assert struck["spike"] == {"apart": 1}
    assert struck["transient"] == {}


def corrupt_labels(kind: str) -> tuple[Tensor, Tensor]:
    labels = torch.tensor([[1, 2, -100, 9]])
    plan = make_plan(4)
    batch = MicroBatch(labels, labels, plan.positions, {0: plan})
    injector = Injector(Inject(step=1, where="data", kind=kind), [], 10, lambda rank: True)
    corrupted, second = injector.corrupt(1, (batch, batch))
    assert second is batch
    return labels, corrupted.labels


def test_data_is_a_label_that_is_no_token_or_every_label_another(ranks: Callable[[int], RankPool]) -> None:
    labels, corrupted = ranks(1)(corrupt_labels, "nan")[0]
    assert corrupted.tolist() == [[1, 2, 11, 9]]
    labels, corrupted = ranks(1)(corrupt_labels, "spike")[0]
    assert corrupted.tolist() == [[6, 7, -100, 4]]
    assert labels.tolist() == [[1, 2, -100, 9]]


def refusals() -> list[str]:
    cases = [
        Inject(step=1, rank=1, layer=2),
        Inject(step=1, rank=1, where="weight", module="1"),
    ]
    said = []
    for case in cases:
        with pytest.raises(ConfigError) as error:
            Injector(case, [Net()], 10, lambda rank: True)
        said.append(str(error.value))
    return said


def test_what_cannot_be_struck_is_said_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2)(refusals)
    assert first == second
    assert "rank 1 has no module layers.2 for where = 'forward'; it has tok_embeddings, layers.0" in first[0]
    assert "rank 1 has no module layers.0.1 for where = 'weight'; it has tok_embeddings, layers.0.0, " in first[1]


def warn() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tests.support.inject").addHandler(handler)
    injector = Injector(Inject(step=2), [Net()], 10, lambda rank: True)
    for step in range(1, 4):
        with injector.fault(step):
            pass
    return said


def test_the_log_says_loudly_that_the_fault_is_made_on_purpose(ranks: Callable[[int], RankPool]) -> None:
    (line,) = ranks(1)(warn)[0]
    assert line.startswith("FAULT INJECTED on purpose in step 2")


def test_a_fault_in_a_modules_backward_spares_what_goes_around_it() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    own = module.weight.detach().sum(0)
    with fault_in(module, Inject(step=1, where="backward", kind="spike")):
        hidden = 1 * x
        (hidden + module(hidden)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (1 + SPIKE * own).expand(2, 4))
