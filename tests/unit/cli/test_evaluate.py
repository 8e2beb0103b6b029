"""The config with which a checkpoint is evaluated."""

from argparse import Namespace
from pathlib import Path

from tests.support.runs import TINY, write_run
from torchtitan_cp.cli.evaluate import evaluation_config
from torchtitan_cp.config import load_config
from torchtitan_cp.config.check import check_config
from torchtitan_cp.curriculum import resolve_stages


def test_a_run_with_a_warm_up_longer_than_its_number_of_stages_can_be_evaluated(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, TINY), ["--lr_scheduler.warmup_steps=2"])
    options = Namespace(tokens=None, variants=None, lengths=None, trials=None)
    evaluated = evaluation_config(config, 1, options)
    check_config(evaluated, resolve_stages(evaluated, 1), 1)
