"""What docs/how_to_add.md says, done once: names of files are true, and an entry is all that the program asks for."""

import re
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from benchmarks.simulation import simulate
from tests.support.pages import REPOSITORY
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.kernels import KERNELS, choose_kernel
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.config import names
from torchtitan_cp.config.run import Metrics
from torchtitan_cp.config.training import LRScheduler, Optimizer
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.optim.build import build_optimizer
from torchtitan_cp.optim.optimizers import OPTIMIZERS, OptimizerKind
from torchtitan_cp.optim.schedule import LR_SHAPES, learning_rate

PAGE = (REPOSITORY / "docs" / "how_to_add.md").read_text(encoding="utf-8")
ROOMS = (REPOSITORY, REPOSITORY / "torchtitan_cp", REPOSITORY / "torchtitan_cp" / "attention")
# Of each thing that can be added, the name in code that its section must give, and the file that has it.
ENTRIES = {
    "Key": ("KEYS", "tests/unit/config/test_keys.py"),
    "Optimizer": ("OPTIMIZERS", "torchtitan_cp/optim/optimizers.py"),
    "Kernel": ("KERNELS", "torchtitan_cp/attention/kernels/__init__.py"),
    "Exchange": ("STRATEGIES", "torchtitan_cp/attention/strategies/__init__.py"),
    "Metric": ("StepRecord", "torchtitan_cp/metrics/step_record.py"),
    "Sink": ("open_files", "torchtitan_cp/metrics/logger.py"),
    "Architecture": ("ARCHITECTURES", "models/__init__.py"),
    "Learning-rate shape": ("LR_SHAPES", "torchtitan_cp/optim/schedule.py"),
}
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=\n## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_has_these_sections() -> None:
    assert list(SECTIONS) == list(ENTRIES)


@pytest.mark.parametrize("thing", ENTRIES)
def test_a_section_names_files_that_exist_and_its_registry(thing: str) -> None:
    name, file = ENTRIES[thing]
    assert name in SECTIONS[thing]
    assert re.search(rf"\b{name}\b", (REPOSITORY / file).read_text(encoding="utf-8"))
    paths = [path for path in re.findall(r"`([\w./]+(?:/|\.py|\.toml|\.md))`", SECTIONS[thing]) if "NAME" not in path]
    assert paths
    for path in paths:
        folders = [*ROOMS, *(REPOSITORY / file).parents[:1]]
        assert any((folder / path).exists() for folder in folders), path


def test_a_config_offers_the_optimizers_that_exist() -> None:
    assert set(names.OPTIMIZERS) == set(OPTIMIZERS)


@pytest.fixture
def sign_descent(monkeypatch: pytest.MonkeyPatch) -> str:
    """An optimizer in a file and an entry."""

    class SignDescent(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= group["lr"] * parameter.grad.sign()

    module = types.ModuleType("sign_descent")
    module.build = lambda groups, settings, dtype: SignDescent(groups, {"lr": settings.lr})  # type: ignore[attr-defined]
    module.parts = lambda groups: ([group] for group in groups)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sign_descent", module)
    kind = OptimizerKind(
        "sign_descent",
        lambda settings: 0.0,
        lambda settings: 12.0,
        lambda settings, n_experts, tp: {"optimizer": settings.name},
        lambda config, tp_degrees: None,
    )
    monkeypatch.setitem(OPTIMIZERS, "sign", kind)
    return "sign"


def test_an_optimizer_is_a_file_and_an_entry(sign_descent: str) -> None:
    net = nn.Linear(2, 1, bias=False)
    before = net.weight.detach().clone()
    optimizer = build_optimizer(net, Optimizer(name=sign_descent, lr=0.5))
    net(torch.tensor([[1.0, -1.0]])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before - torch.tensor([[0.5, -0.5]]))


def test_a_learning_rate_shape_is_a_function_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LR_SHAPES, "root", lambda progress, end, decay: 1 - (1 - end) * progress**0.5)
    settings = LRScheduler(shape="root", end_fraction=0.0)
    assert [learning_rate(step, 5, 2.0, settings) for step in (0, 1, 4)] == [2.0, 1.0, 0.0]


def test_a_kernel_is_an_entry_that_a_plan_runs_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "mine", KERNELS["reference"])
    q = torch.zeros(1, 4, 2, 8)
    assert choose_kernel("mine", q, q) is KERNELS["mine"]


def test_an_exchange_is_an_entry_that_a_plan_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "mine", STRATEGIES["ring"])
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    outs = [simulate(q, k, v, mask=AttentionMask(), ranks=2, strategy=name).out for name in ("ring", "mine")]
    torch.testing.assert_close(*outs)


def test_a_sink_gets_the_kinds_of_things_that_it_has_methods_for(tmp_path: Path) -> None:
    class Lines:
        name = "lines"
        found: ClassVar[list[Any]] = []

        def scalars(self, values: dict[str, float], step: int) -> None:
            self.found.append((step, values))

    metrics = MetricsLogger(Metrics(tensorboard=False), 1, 0, enabled=False)
    metrics.open_files(tmp_path, 0)
    metrics.sinks.append(Lines())
    metrics.scalars({"a": 1.0}, 3)
    metrics.text("tag", "nobody takes it", 3)
    metrics.close()
    assert Lines.found == [(3, {"a": 1.0})]
