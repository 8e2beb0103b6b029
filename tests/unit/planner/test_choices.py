"""Which values a search tries for a whole run."""

from pathlib import Path

import pytest

from models import ARCHITECTURES
from tests.support.runs import write_run
from torchtitan_cp.config import load_config
from torchtitan_cp.planner.choices import Choice, Savings, choices, savings_to_try, with_choice
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.registry import register

H100 = make_cluster("h100-80g", ranks_per_node=4)
PLAIN, STATE, WEIGHTS = (False, False), (True, False), (False, True)


@pytest.mark.parametrize(
    ("overrides", "tiles", "on_host"),
    [
        ((), [1, 8, 16], [PLAIN, STATE, WEIGHTS]),
        (("--activation.mlp_tiles=4",), [4], [PLAIN, STATE, WEIGHTS]),
        (("--optimizer.offload_state=true",), [1, 8, 16], [STATE, (True, True)]),
        (("--parallel.fsdp_cpu_offload=true",), [1, 8, 16], [WEIGHTS]),
        (("--optimizer.name=muon",), [1, 8, 16], [PLAIN, STATE]),
    ],
)
def test_what_saves_memory_is_tried_from_least_to_most_and_what_is_set_stays(
    tmp_path: Path, overrides: tuple[str, ...], tiles: list[int], on_host: list[tuple[bool, bool]]
) -> None:
    tried = list(savings_to_try(load_config(write_run(tmp_path), overrides), H100))
    assert list(dict.fromkeys(one.mlp_tiles for one in tried)) == tiles
    assert list(dict.fromkeys(one[2:] for one in tried)) == on_host
    assert len(tried) == 2 * len(tiles) * len(on_host)
    assert (tried[0].offload, tried[-1].offload) == (False, True)


def test_on_a_cpu_only_tiles_are_tried(tmp_path: Path) -> None:
    tried = list(savings_to_try(load_config(write_run(tmp_path), []), make_cluster("cpu")))
    assert tried == [Savings(1), Savings(8), Savings(16)]


def test_a_choice_is_written_to_the_keys_it_names(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    config = load_config(write_run(tmp_path), ["--optimizer.offload_state=true"])
    first = next(choices(config, sized_model_args(config), H100))
    assert first == Choice(1, 1, 1, "none", Savings(offload_state=True))
    assert first.savings.number == 1
    written = with_choice(config, Choice(2, 1, 1, "full", Savings(8, True, False, True)), H100)
    assert (written.parallel.tp, written.parallel.fsdp_cpu_offload, written.optimizer.offload_state) == (2, True, False)
    assert (written.activation.checkpoint, written.activation.mlp_tiles, written.activation.offload) == (
        "full",
        8,
        True,
    )
    assert written.context_parallel.all_to_all_ranks == 2
