"""AdamW with moments in 8 bits, without its package."""

import importlib
import re
from typing import Any

import pytest

from tests.support.small_net import small_net
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.training import Optimizer
from torchtitan_cp.optim.build import build_optimizer


def test_a_missing_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=re.escape("pip install 'torchtitan-cp[float8]'")):
        build_optimizer(small_net(), Optimizer(state="8bit"))
