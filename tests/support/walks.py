"""Stages walked as one rank of many."""

from collections.abc import Sequence
from pathlib import Path

from models import ARCHITECTURES
from tests.support.runs import TINY, write_run
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.planner.dry_run import StageWalk, stage_walker
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run

LONGER = (
    "--model.overrides={dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 704}",
    "--curriculum.stages[0].seq_len=16384",
    "--curriculum.stages[0].global_batch_tokens=32768",
    "--training.loss_chunk_tokens=8192",  # a walk's time is that of its operations, and each chunk has some
)


TWO_BY_TWO = (*LONGER, "--parallel.pp=2", "--parallel.tp=2")
SHORTER_STAGE = """
[[curriculum.stages]]
seq_len = 1024
steps = 20
global_batch_tokens = 4096
"""


def walk_of_two(folder: Path) -> tuple[Config, Path]:
    """A config of two stages, and where it is."""
    path = write_run(folder, TINY + SHORTER_STAGE)
    register(ARCHITECTURES)
    return load_config(path, TWO_BY_TWO), path


def walk_all(config: Config, stages: Sequence[ResolvedStage]) -> list[StageWalk]:
    """Stages walked by rank 0 of four, one after the other."""
    with stage_walker(resolve_run(config, 4, sized_model_args(config)), 0) as walk:
        return [walk(stage) for stage in stages]
