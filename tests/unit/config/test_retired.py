"""Files of earlier versions: keys that are gone or have another name."""

import logging
from pathlib import Path

import pytest

from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.config.retired import GONE

DEFAULTS = """
[health]
policy = ["rollback", "lower_lr"]
max_lr_cuts = 1
lr_factor = 0.1
lr_steps = 100
idle_expert_steps = 100
spike_window = 64
bundles = 3
max_consecutive_skips = 5
inject = {step = 0, steps = 1, rank = 0, where = "forward", layer = 0, module = "", kind = "nan", transient = false}

[compile]
mode = "default"

[optimizer]
implementation = "fused"
muon_momentum = 0.95

[parallel]
expert_capacity = 0.0
fsdp_prefetch = 1
pp_split = []

[data]
separator = -1
prefetch_batches = 2
group_depth = 0

[checkpoint]
keep_every_steps = 0

[evaluation.passkey]
keys = 4
depths = 5
"""


def load(folder: Path, text: str, *overrides: str):  # type: ignore[no-untyped-def]
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_the_config_that_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, DEFAULTS) == load(tmp_path, "")
    named = {f"{section}.{key}" for section, key in (name.split(".", 1) for name in GONE)}
    assert all(f"{name.split('.')[-1]} = " in DEFAULTS for name in named), "every key that is gone is in that file"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("parallel.expert_capacity=1.25", "no expert drops a token"),
        ("health.policy=[]", "max_rollbacks = 0 never rolls back"),
        ("health.inject.step=3", "only tests inject faults"),
        ("compile.mode=max-autotune", "default mode"),
    ],
)
def test_a_value_that_asks_for_what_is_gone_is_refused_with_the_way_on(tmp_path: Path, override: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no such key any more") as refused:
        load(tmp_path, "", f"--{override}")
    assert fix in str(refused.value)


def test_a_value_with_another_name_is_read_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert load(tmp_path, "[health]\non_spike = 'trip'\n").health.on_spike == "handle"
    assert "health.on_spike = 'trip' is now called 'handle'" in caplog.text
