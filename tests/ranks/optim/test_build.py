"""What a checkpoint gives back to an optimizer, on these ranks and on others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.rank_pool import RankPool
from tests.support.small_net import Net, assert_same, names_of, small_net, train, weights
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.config.training import Optimizer, ParameterGroup
from torchtitan_cp.optim.build import build_optimizer, set_learning_rates
from torchtitan_cp.optim.offload import keep_state_on_host
from torchtitan_cp.optim.optimizers import OPTIMIZERS


def build_on_ranks(settings: Optimizer) -> tuple[Net, torch.optim.Optimizer]:
    model = small_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, settings)


def train_and_save(settings: Optimizer, folder: str) -> list[Tensor]:
    """Two steps, a checkpoint, and the weights after a third step."""
    model, optimizer = build_on_ranks(settings)
    train(model, optimizer, 2)
    checkpoints = CheckpointManager(folder)
    checkpoints.save(Progress(step=2), [model], [optimizer])
    checkpoints.close()
    train(model, optimizer, 1, first=2)
    return weights(model)


def load_and_train(settings: Optimizer, folder: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    model, optimizer = build_on_ranks(settings)
    CheckpointManager(folder).load(Path(folder) / "step-2", [model], [optimizer])
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
    changed = Optimizer(name="adamw", beta1=0.8, weight_decay=0.2)
    ((_, groups),) = ranks(1)(load_and_train, changed, str(tmp_path))
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert all(group["betas"] == (0.8, 0.95) and group["lr_scale"] == 1 for group in groups)
    assert [len(group["params"]) for group in groups] == [3, 2]


def train_sharded(settings: Optimizer, on_host: bool) -> list[Tensor]:
    model, optimizer = build_on_ranks(settings)
    if on_host:
        keep_state_on_host(optimizer, OPTIMIZERS[settings.name].parts)
    train(model, optimizer, 3)
    return weights(model)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_of_sharded_parameters_is_kept_on_the_host_and_changes_no_step(
    ranks: Callable[[int], RankPool], name: str
) -> None:
    settings = Optimizer(name=name)
    assert_same(ranks(2)(train_sharded, settings, True)[0], ranks(2)(train_sharded, settings, False)[0], rtol=0)


class Wide(nn.Module):
    """Matrices large enough, on two ranks too, for torchao to keep their moments in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def steps_in_8_bits(settings: Optimizer, folder: str, load: bool, on_host: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    model = Wide()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = build_optimizer(model, settings)
    if on_host:
        keep_state_on_host(optimizer, OPTIMIZERS[settings.name].parts)

    def train_on(first: int, last: int) -> None:
        for step in range(first, last):
            model(torch.linspace(-1, 1, 64) * (step + 1)).square().sum().backward()
            set_learning_rates(optimizer, 0.001)
            optimizer.step()
            optimizer.zero_grad()

    train_on(0, 0 if load else 2)
    checkpoints = CheckpointManager(folder)
    if load:
        checkpoints.load(Path(folder) / "step-2", [model], [optimizer])
    else:
        checkpoints.save(Progress(step=2), [model], [optimizer])
        checkpoints.close()
    train_on(2, 3)
    return weights(model)


@pytest.mark.deep
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
