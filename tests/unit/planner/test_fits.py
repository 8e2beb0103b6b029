"""One table for several numbers of GPUs."""

import re

from rich.console import Console

from models import ARCHITECTURES
from tests.support.long_plans import LONG
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.fits import print_fits, search_each
from torchtitan_cp.planner.search import Search
from torchtitan_cp.training.registry import register

STAGE = (
    "--curriculum.stages=[{seq_len = 131072, steps = 1, global_batch_tokens = 524288}]",
    "--lr_scheduler.warmup_steps=0",
)


def test_a_line_for_each_number_of_gpus_says_what_fits_or_by_how_much_it_misses() -> None:
    register(ARCHITECTURES)
    config = load_config(LONG, STAGE)
    rows = search_each(config, [make_cluster("h100-80g", ranks_per_node=ranks) for ranks in (1, 2, 3, 4)])
    console = Console(width=200, record=True)
    assert print_fits(console, rows)
    one, two, three, four, refusal = re.findall(r"^ *(\d .*)$", console.export_text(), re.MULTILINE)
    assert re.match(r"1  misses by [\d.]+ GiB of a node's host memory  [\d.]+, [\d.]+ +cp 1 +full ", one)
    assert not one.rstrip()[-1].isdigit()  # nothing of a rate
    assert re.match(
        r"2  yes +[\d.]+, [\d.]+ +cp 2 all_gather +none, 8 mlp_tiles +activations +[\d.]+ min +0 s +6,", two
    )
    assert re.match(r"3  refused", three)
    assert "3 GPUs are refused: curriculum.stages[0]" in refusal
    assert re.match(r"4  yes ", four)
    found = rows[1].result
    assert isinstance(found, Search)
    assert found.found
    (planned,) = found.found.picked
    needs = ", ".join(f"{need.needed_bytes / 2**30:.1f}" for need in planned.needs)
    assert needs in two
    assert f"{planned.tokens_per_second:,.0f}" in two


def test_where_nothing_fits_and_all_is_refused_the_answer_is_no() -> None:
    register(ARCHITECTURES)
    config = load_config(LONG, [*STAGE, "--model.flavor=405B"])
    rows = search_each(config, [make_cluster("h100-80g", ranks_per_node=ranks) for ranks in (1, 3)])
    assert isinstance(rows[1].result, ConfigError)
    console = Console(width=200, record=True)
    assert not print_fits(console, rows)
    assert "1  misses by " in console.export_text()


def test_stages_with_other_exchanges_share_a_line() -> None:
    register(ARCHITECTURES)
    stages = (f"{{seq_len = {length}, steps = 1, global_batch_tokens = 524288}}" for length in (16384, 131072))
    lengths = ", ".join(stages)
    config = load_config(LONG, [f"--curriculum.stages=[{lengths}]", "--lr_scheduler.warmup_steps=0"])
    console = Console(width=200, record=True)
    assert print_fits(console, search_each(config, [make_cluster("h100-80g", ranks_per_node=8)]))
    assert re.search(r"cp 1 / cp [248] \w+", console.export_text())
