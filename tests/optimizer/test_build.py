"""Parameter groups, implementations, where the state is kept, and what a checkpoint gives back."""

import importlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import RankPool
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Optimizer, ParameterGroup
from torchtitan_cp.optimizer import build_optimizer, set_learning_rates
from torchtitan_cp.optimizer.offload import keep_state_on_host


class Net(nn.Module):
    """The outline of a model: something to embed, blocks, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6, bias=False)])
        self.norm = nn.RMSNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        return self.norm(hidden + self.layers[1](self.layers[0](hidden).tanh()))


def small_net() -> Net:
    torch.manual_seed(1)
    return Net()


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    return {name for name, p in model.named_parameters() if any(p is held for held in group["params"])}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        tokens = torch.tensor([[step, 1, 2, 6]])
        (model(tokens) * torch.arange(6.0)).sum().backward()
        set_learning_rates(optimizer, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    tensors = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in tensors]


def assert_same(one: list[Tensor], other: list[Tensor], rtol: float = 1e-5) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-7)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = small_net()
    decaying, plain = build_optimizer(model, Optimizer(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert names_of(model, decaying) == {"tok_embeddings.weight", "layers.0.weight", "layers.1.weight"}
    assert names_of(model, plain) == {"layers.0.bias", "norm.weight"}


def test_the_first_rule_that_matches_a_parameter_rules_it() -> None:
    model = small_net()
    rules = (ParameterGroup("^tok|norm", 0.1, 0.0), ParameterGroup("weight", 2.0), ParameterGroup("bias"))
    optimizer = build_optimizer(model, Optimizer(lr=0.5, weight_decay=0.3, groups=rules))
    found = {
        (group["lr"], group["lr_scale"], group["weight_decay"]): names_of(model, group)
        for group in optimizer.param_groups
    }
    assert found == {
        (0.05, 0.1, 0.0): {"tok_embeddings.weight", "norm.weight"},
        (1.0, 2.0, 0.3): {"layers.0.weight", "layers.1.weight"},
        (0.5, 1.0, 0.0): {"layers.0.bias"},
    }
    set_learning_rates(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.5, 0.25]


@pytest.mark.parametrize("rules", [("nrom",), ("norm", "norm.weight")])
def test_a_rule_that_matches_nothing_is_refused_by_name(rules: tuple[str, ...]) -> None:
    index, last = len(rules) - 1, rules[-1]
    with pytest.raises(ConfigError) as caught:
        build_optimizer(small_net(), Optimizer(groups=tuple(ParameterGroup(rule) for rule in rules)))
    assert f"optimizer.groups[{index}].match = '{last}' matches no parameter that the rules" in str(caught.value)
    assert "names are like tok_embeddings.weight, layers.0.bias, norm.weight" in str(caught.value)


def test_a_rule_for_another_pipeline_stage_is_not_refused() -> None:
    settings = Optimizer(groups=(ParameterGroup("output"),))
    build_optimizer(small_net(), settings, names=["tok_embeddings.weight", "output.weight"])


def test_every_implementation_takes_the_same_steps() -> None:
    results = []
    for implementation in ("fused", "foreach", "for-loop"):
        model = small_net()
        optimizer = build_optimizer(model, Optimizer(implementation=implementation))
        flags = {name: optimizer.param_groups[0][name] for name in ("fused", "foreach")}
        assert flags == {"fused": True, "foreach": None} if implementation == "fused" else not flags["fused"]
        train(model, optimizer, 3)
        results.append(weights(model))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_kept_on_the_host_between_steps_changes_no_step(name: str) -> None:
    model, twin = small_net(), small_net()
    optimizer, other = (build_optimizer(m, Optimizer(name=name)) for m in (model, twin))
    keep_state_on_host(optimizer)
    train(model, optimizer, 3)
    train(twin, other, 3)
    assert_same(weights(model), weights(twin), rtol=0)


def test_offloading_says_that_it_is_inactive_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_optimizer(small_net(), Optimizer(offload_state=True))
    assert "optimizer.offload_state is inactive" in caplog.text


def test_a_missing_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=re.escape("pip install 'torchtitan-cp[float8]'")):
        build_optimizer(small_net(), Optimizer(state="8bit"))


def build_on_ranks(settings: Optimizer) -> tuple[Net, torch.optim.Optimizer]:
    model = small_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, settings)


def train_and_save(settings: Optimizer, folder: str) -> list[Tensor]:
    """Two steps, a checkpoint as torchtitan_cp.checkpoint writes it, and the weights after a third step."""
    model, optimizer = build_on_ranks(settings)
    train(model, optimizer, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train(model, optimizer, 1, first=2)
    return weights(model)


def load_and_train(settings: Optimizer, folder: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    model, optimizer = build_on_ranks(settings)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 1, first=2)
    return weights(model), [{**group, "params": names_of(model, group)} for group in optimizer.param_groups]


RULES = (ParameterGroup("norm", lr_scale=0.5),)


@pytest.mark.parametrize(
    "settings", [Optimizer(groups=RULES), Optimizer(name="muon", groups=RULES)], ids=lambda s: s.name
)
def test_a_checkpoint_of_two_ranks_goes_on_alike_on_one_and_on_two(
    ranks: Callable[[int], RankPool], tmp_path: Path, settings: Optimizer
) -> None:
    expected = ranks(2)(train_and_save, settings, str(tmp_path))[0]
    for size in (1, 2):
        (resumed, _), *_ = ranks(size)(load_and_train, settings, str(tmp_path))
        assert_same(resumed, expected)


def test_numbers_come_from_the_file_and_not_from_the_checkpoint(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    ranks(1)(train_and_save, Optimizer(groups=RULES), str(tmp_path))
    changed = Optimizer(name="adamw", beta1=0.8, weight_decay=0.2, implementation="foreach")
    ((_, groups),) = ranks(1)(load_and_train, changed, str(tmp_path))
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert all(group["betas"] == (0.8, 0.95) and group["foreach"] and group["lr_scale"] == 1 for group in groups)
    assert [len(group["params"]) for group in groups] == [3, 2]


class Wide(nn.Module):
    """Matrices large enough, on two ranks too, for torchao to keep their moments in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def steps_in_8_bits(settings: Optimizer, folder: str, load: bool) -> list[Tensor]:
    torch.manual_seed(1)
    model = Wide()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = build_optimizer(model, settings)

    def train_on(first: int, last: int) -> None:
        for step in range(first, last):
            model(torch.linspace(-1, 1, 64) * (step + 1)).square().sum().backward()
            set_learning_rates(optimizer, 0.001)
            optimizer.step()
            optimizer.zero_grad()

    train_on(0, 0 if load else 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if load:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        dcp.save(state, checkpoint_id=folder)
    train_on(2, 3)
    return weights(model)


def test_moments_in_8_bits_step_nearly_alike_and_resume_on_other_ranks(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="the extra float8 is not installed")
    settings = Optimizer(state="8bit")
    expected = ranks(2)(steps_in_8_bits, settings, str(tmp_path), False)[0]
    for size in (1, 2):
        assert_same(ranks(size)(steps_in_8_bits, settings, str(tmp_path), True)[0], expected)
    plain = ranks(2)(steps_in_8_bits, Optimizer(), str(tmp_path / "plain"), False)[0]
    for got, want in zip(expected, plain, strict=True):
        # Three steps of 0.001 or less; the first is exact but for its sign.
        assert (got - want).abs().max() < 0.001
        assert not torch.equal(got, want)
