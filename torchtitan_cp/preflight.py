"""Everything that can be found wrong with a config before a rank starts.

`python -m torchtitan_cp.preflight CONFIG --ranks N` asks for it; so does the launcher, which a person waits for: what
only training needs is not imported here.
"""

import argparse
import sys
from typing import Any

from models import ARCHITECTURES
from torchtitan_cp import registry
from torchtitan_cp.attention import ContextParallelError, make_plan
from torchtitan_cp.config import Config, UserError, complaint, load_config
from torchtitan_cp.config.check import check_config, check_dump_folder
from torchtitan_cp.curriculum import StagePlan, check_head_dim, resolve_stages
from torchtitan_cp.data import check_corpus, check_tokenizer
from torchtitan_cp.export import check_exportable
from torchtitan_cp.metrics import layer_costs
from torchtitan_cp.parallel import check_shape, plan_stages

BAD_INPUT = 2


def preflight(config: Config, ranks: int) -> str:
    """Check a config as every room would when it meets it.

    Args:
        ranks: how many there will be.

    Returns:
        a line that says what will run.

    Raises:
        UserError, ContextParallelError: the first thing found wrong.
    """
    check_config(config, ranks)
    shape = registry.shape_of(config.model)
    stages = resolve_stages(config, ranks)
    check_head_dim(stages, shape.head_dim)
    check_exportable(config, shape)
    costs = layer_costs(shape, max(stage.seq_len for stage in stages))
    for stage in stages:
        check_stage(config, shape, stage)
        plan_stages(config.parallel, stage.pp, costs)
    check_corpus(config.data)
    check_tokenizer(config.tokenizer)
    check_dump_folder(config.job.dump_folder)
    lengths = " -> ".join(f"{stage.name} (cp {stage.cp})" for stage in stages)
    return f"{sum(stage.steps for stage in stages)} steps on {ranks} rank{'s' if ranks > 1 else ''}: {lengths}"


def check_stage(config: Config, shape: Any, stage: StagePlan) -> None:
    """Refuse a stage that its model or its attention cannot be dealt out for.

    Raises:
        UserError, ContextParallelError: what a run would refuse.
    """
    registry.check_support(config, stage)
    check_shape(shape, stage.tp)
    settings = config.context_parallel
    make_plan(
        stage.seq_len,
        ranks=stage.cp,
        strategy=stage.strategy,
        kernel=settings.kernel,
        layout=settings.layout,
        all_to_all_ranks=stage.all_to_all_ranks,
        kv_transfer=settings.kv_transfer,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp check",
        description="Say whether a config would run on so many ranks, or what is wrong with it (exit code 2). "
        "Any key can be overridden: --section.key=value",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("--ranks", type=int, metavar="N", default=1, help="of the job, on all nodes (default 1)")
    options, overrides = parser.parse_known_args(arguments)
    if options.ranks < 1:
        parser.error("--ranks is at least 1")
    registry.register(ARCHITECTURES)
    try:
        print(f"{options.config}: {preflight(load_config(options.config, overrides), options.ranks)}")
    except (UserError, ContextParallelError) as error:
        print(complaint(options.config, error), file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
