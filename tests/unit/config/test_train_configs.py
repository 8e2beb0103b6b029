"""Every file of train_configs/ on the ranks it names: checked as before a run, and planned to the last tile."""

import re
from pathlib import Path

import pytest

from tests.support.deep import deep_rows
from tests.support.recipes import FILES, load, ranks_of
from torchtitan_cp.attention import make_plan
from torchtitan_cp.cli.check import check_run
from torchtitan_cp.config import Config
from torchtitan_cp.config.check import check_config
from torchtitan_cp.curriculum import ResolvedStage, resolve_stages


def planned_pairs(config: Config, stage: ResolvedStage) -> int:
    """Query-key pairs in the tiles of every rank of one context-parallel group."""
    settings, ranks = config.context_parallel, stage.cp
    inner = ranks if stage.strategy == "all_to_all" else stage.all_to_all_ranks
    plans = [
        make_plan(
            stage.seq_len,
            ranks=ranks,
            rank=rank,
            strategy=stage.strategy,
            layout=settings.layout,
            all_to_all_ranks=inner,
        )
        for rank in range(0, ranks, inner)  # the ranks of an inner group have the same tiles, each for its heads
    ]
    return sum(tile.pairs for plan in plans for step in plan.steps for tile in step.tiles)


# Models of transformers that take seconds to look at.
SLOW = (
    *("gemma3_4b_128k_to_512k", "gemma3_4b_128k_one_gpu", "olmo3_7b_65k", "qwen3_8b_1m"),
    *("kimi_linear_48b_1m", "qwen3_next_80b_256k_to_1m"),
)


@deep_rows("name", [path.stem for path in FILES], default=[path.stem for path in FILES if path.stem not in SLOW])
def test_a_config_that_ships_passes_every_check_and_its_plans_cover_the_causal_mask(name: str, tmp_path: Path) -> None:
    path = next(path for path in FILES if path.stem == name)
    config, ranks = load(path, tmp_path / "run"), ranks_of(path)
    assert f" on {ranks} rank" in check_run(config, ranks)
    for stage in resolve_stages(config, ranks):
        assert stage.steps > 0
        assert planned_pairs(config, stage) == stage.seq_len * (stage.seq_len + 1) // 2


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_config_that_ships_can_be_tried_in_two_steps_of_its_first_stage(path: Path, tmp_path: Path) -> None:
    """Whatever its warm-up, and whether its stages end by steps, tokens or a gate."""
    config, ranks = load(path, tmp_path / "run", "--curriculum.stages[0].steps=2"), ranks_of(path)
    stages = resolve_stages(config, ranks)
    assert (stages[0].steps, stages[0].until) == (2, {})
    check_config(config, stages, ranks)


PUBLISHED = {
    "lwm_32k_to_1m": [(2**15, 1e6, 1), (2**17, 1e7, 1), (2**18, 1e7, 1), (2**19, 2.5e7, 1), (2**20, 5e7, 1)],
    "prolong_64k_512k": [(2**16, 8e6, 1), (2**19, 128e6, 1)],
    "qwen2_5_1m": [(4096, 1e4, 1), (32768, 1e6, 1), (65536, 1e6, 1), (131072, 5e6, 1), (262144, 1e7, 1)],
    "yarn_128k": [(65536, 1e4, 16), (65536, 1e4, 32)],
    "gemma3_4b_128k_to_512k": [(2**17, 1e6, 8), (2**18, 1e6, 16), (2**19, 1e6, 32)],
    "gemma3_4b_128k_one_gpu": [(2**17, 1e6, 8)],
    "llama3_1_8b_128k_one_gpu": [(2**17, 5e5, 8)],
    "llama3_1_8b_128k_eight_gpus": [(2**15, 5e5, 8), (2**17, 5e5, 8)],
    "qwen3_8b_256k_eight_gpus": [(2**16, 1e6, 1), (2**17, 5e6, 1), (2**18, 1e7, 1)],
    "gpt_oss_20b_256k": [(2**17, 150000, 32), (2**18, 150000, 64)],
    "olmo3_7b_65k": [(65536, 5e5, 8)],
    "sft_128k": [(2**17, 5e5, 8)],
    "qwen3_235b_256k": [(2**18, 5e6, 1)],
    "qwen3_next_80b_256k_to_1m": [(2**18, 1e7, 1), (2**19, 1e7, 2), (2**20, 1e7, 4)],
    "qwen3_8b_1m": [(2**17, 5e6, 1), (2**18, 1e7, 1), (2**19, 1e7, 2), (2**20, 1e7, 4)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_has_the_lengths_thetas_and_factors_of_its_paper(name: str, tmp_path: Path) -> None:
    path = next(path for path in FILES if path.stem == name)
    stages = resolve_stages(load(path, tmp_path), ranks_of(path))
    assert [(stage.seq_len, stage.rope.theta, stage.rope.factor) for stage in stages] == PUBLISHED[name]


def test_llama3_goes_from_8k_to_128k_in_six_stages_of_800_billion_tokens(tmp_path: Path) -> None:
    path = next(path for path in FILES if path.stem == "llama3_8k_to_128k")
    stages = load(path, tmp_path).curriculum.stages
    assert len(stages) == 6
    assert (stages[0].seq_len, stages[-1].seq_len) == (8192, 131072)
    assert sum(stage.tokens for stage in stages) == 800e9


def test_llama3_runs_with_the_8b_on_the_ranks_its_head_says(tmp_path: Path) -> None:
    path = next(path for path in FILES if path.stem == "llama3_8k_to_128k")
    line = re.search(r"^# The same stages fit the 8B on (\d+) ranks: (.*)$", path.read_text(), re.MULTILINE)
    assert line
    assert "steps on 128 ranks" in check_run(load(path, tmp_path, *line[2].split()), int(line[1]))


def test_the_flagship_goes_from_4k_to_a_million_tokens(tmp_path: Path) -> None:
    path = next(path for path in FILES if path.stem == "llama3_8b_4k_to_1m")
    lengths = [stage.seq_len for stage in load(path, tmp_path).curriculum.stages]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (4096, 2**20)
