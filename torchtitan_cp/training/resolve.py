"""Whether a run may be: everything that can be found wrong with a config for a number of ranks, before one starts.

A person waits for it: what only training needs is not imported here.
"""

from typing import Any

from torchtitan_cp.attention import make_plan
from torchtitan_cp.config import Config
from torchtitan_cp.config.check import check_config, check_dump_folder
from torchtitan_cp.curriculum import StagePlan, check_head_dim, resolve_stages
from torchtitan_cp.data import check_corpus, check_tokenizer
from torchtitan_cp.metrics import layer_costs
from torchtitan_cp.parallel import check_tensor_parallel, plan_pipeline
from torchtitan_cp.training import registry
from torchtitan_cp.training.export import check_exportable


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
    args = registry.model_args_of(config.model)
    stages = resolve_stages(config, ranks)
    check_head_dim(stages, args.head_dim)
    check_exportable(config, args)
    costs = layer_costs(args, max(stage.seq_len for stage in stages))
    for stage in stages:
        check_stage(config, args, stage)
        plan_pipeline(config.parallel, stage.pp, costs)
    check_corpus(config.data)
    check_tokenizer(config.tokenizer)
    check_dump_folder(config.job.dump_folder)
    lengths = " -> ".join(f"{stage.name} (cp {stage.cp})" for stage in stages)
    return f"{sum(stage.steps for stage in stages)} steps on {ranks} rank{'s' if ranks > 1 else ''}: {lengths}"


def check_stage(config: Config, args: Any, stage: StagePlan) -> None:
    """Refuse a stage that its model or its attention cannot be dealt out for.

    Raises:
        UserError, ContextParallelError: what a run would refuse.
    """
    registry.check_support(config, stage)
    check_tensor_parallel(args, stage.tp)
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
