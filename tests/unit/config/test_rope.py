"""Keys of a stage's rope that do not go together, and some that do."""

import dataclasses

import pytest

from tests.support.ropes import LONGROPE, YARN, config_of
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.check import check_config
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.curriculum import resolve_stages


def check(rope: Rope) -> None:
    config = config_of(rope)
    check_config(config, resolve_stages(config, 1), 1)


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        (
            Rope(factor=8.0),
            ".factor does nothing with kind = 'none'\n  fix: remove it, or use kind = 'linear' or 'ntk'",
        ),
        (
            Rope(kind="ntk", factor=2.0, beta_fast=16.0),
            ".beta_fast does nothing with kind = 'ntk'\n  fix: remove it, or",
        ),
        (Rope(kind="linear", factor=2.0, long_factor=(2.0,)), ".long_factor does nothing with kind = 'linear'"),
        (Rope(kind="ntk"), " has kind = 'ntk' and no factor\n  fix: add factor = 8 or another"),
        (
            Rope(kind="yarn", original_seq_len=4096),
            " has kind = 'yarn' and no factor\n  fix: add factor = 4 or another",
        ),
        (dataclasses.replace(YARN, factor=1.0, attention_factor=1.5), " has kind = 'yarn' and no factor"),
        (dataclasses.replace(LONGROPE, factor=1.0), " has kind = 'longrope' and no factor"),
        (Rope(kind="yarn", factor=4.0), " has kind = 'yarn' and original_seq_len = 0\n  fix: set it to the length"),
        (Rope(kind="llama3", factor=8.0), " has kind = 'llama3' and original_seq_len = 0"),
        (
            dataclasses.replace(YARN, original_seq_len=32768),
            ".original_seq_len = 32768 is longer than the stage's seq_len = 16384\n  fix: give an original_seq_len "
            "of at most 16384, or leave the rope out of this stage",
        ),
        (
            dataclasses.replace(LONGROPE, original_seq_len=32768),
            ".original_seq_len = 32768 is longer than the stage's seq_len = 16384\n  fix: give short_factor",
        ),
        (
            dataclasses.replace(LONGROPE, long_factor=()),
            " has kind = 'longrope' and no long_factor\n  fix: give head_dim / 2",
        ),
        (
            dataclasses.replace(LONGROPE, long_factor=(1.0, 0.0)),
            ": long_factor and short_factor divide, so each number must be above 0\n  fix: use 1",
        ),
        (
            dataclasses.replace(YARN, beta_fast=1.0),
            ": beta_fast must be above beta_slow, and that above 0\n  fix: use e.g. 32",
        ),
        (dataclasses.replace(YARN, beta_slow=0.0), ": beta_fast must be above beta_slow, and that above 0"),
        (dataclasses.replace(YARN, mscale=1.0), " has one of mscale and mscale_all_dim\n  fix: give both, or neither"),
        (
            dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.2),
            " has attention_factor, which overrides mscale\n  fix: give one of them",
        ),
        (dataclasses.replace(YARN, theta=1.0), ".theta = 1 turns all pairs at the same speed"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_with_the_way_to_mend_it(rope: Rope, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(rope)
    assert f"curriculum.stages[1].rope{wanted}" in str(caught.value)


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        LONGROPE,
        dataclasses.replace(LONGROPE, factor=1.0, attention_factor=1.19),
        dataclasses.replace(LONGROPE, original_seq_len=32768, short_factor=LONGROPE.long_factor),
    ],
)
def test_keys_that_go_together_pass(rope: Rope) -> None:
    check(rope)
