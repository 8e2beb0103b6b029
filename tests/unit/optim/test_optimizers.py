"""What an optimizer of the registry excludes, and what must be the same to resume with it."""

import pytest

from torchtitan_cp.config import Config, ConfigError, names
from torchtitan_cp.config.training import Optimizer, Parallel
from torchtitan_cp.optim.optimizers import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_in_8_bits_need_one_tensor_parallel_degree(name: str) -> None:
    config = Config(optimizer=Optimizer(name=name, state="8bit"))
    OPTIMIZERS[name].check(config, {2})
    with pytest.raises(ConfigError, match="'8bit' does not work with stages of different tp"):
        OPTIMIZERS[name].check(config, {1, 2})


def test_muon_does_not_run_with_weights_on_the_host() -> None:
    config = Config(parallel=Parallel(fsdp_cpu_offload=True))
    OPTIMIZERS["adamw"].check(config, {1})
    with pytest.raises(ConfigError, match=r"fsdp_cpu_offload does not work with optimizer.name = 'muon'"):
        OPTIMIZERS["muon"].check(config, {1})


def test_a_run_is_known_by_what_its_moments_are_of() -> None:
    adamw, muon, eight = Optimizer(), Optimizer(name="muon"), Optimizer(state="8bit")
    assert OPTIMIZERS["adamw"].identity(adamw, 8, 2) == {"optimizer": "adamw, state in float32"}
    assert OPTIMIZERS["muon"].identity(muon, 0, 1) == {"optimizer": "muon, state in float32"}
    assert OPTIMIZERS["muon"].identity(muon, 8, 1) == {"optimizer": "muon, experts too, state in float32"}
    assert OPTIMIZERS["adamw"].identity(eight, 0, 2)["the tensor-parallel degree of 8-bit moments"] == 2


def test_config_and_registry_name_the_same_optimizers() -> None:
    assert tuple(OPTIMIZERS) == names.OPTIMIZERS
