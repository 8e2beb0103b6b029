"""`torchtitan-cp evaluate CHECKPOINT` measures a checkpoint over a grid of lengths and depths.

Losses by source and position, context gain, and how often planted keys are found again, whatever time that takes: as
numbers (evaluation.json) and pictures (PNG). A single process does it, or all ranks together, each with its part of
every sequence: `torchrun --nproc-per-node 8 -m torchtitan_cp.cli.evaluate CHECKPOINT`.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from matplotlib.image import imsave
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.checkpoint.weights import SavedModel, load_weights, open_saved_model
from torchtitan_cp.config import Config, UserError
from torchtitan_cp.config.check import check_config
from torchtitan_cp.config.names import VARIANTS
from torchtitan_cp.config.sections import (
    Activation,
    Compile,
    ContextParallel,
    Optimizer,
    Parallel,
    Stage,
    StageActivation,
)
from torchtitan_cp.curriculum import resolve_stages
from torchtitan_cp.data import prepare
from torchtitan_cp.evaluation import EvaluationResult
from torchtitan_cp.metrics.figures import draw_loss_by_position, draw_retrieval_map
from torchtitan_cp.parallel import Meshes
from torchtitan_cp.runtime import World, start_ranks, stop_ranks
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training import registry
from torchtitan_cp.training.data_pipeline import DataPipeline
from torchtitan_cp.training.evaluator import Evaluator
from torchtitan_cp.training.model import ParallelModel

WAIT_SECONDS = 3600.0


def evaluate(saved: SavedModel, config: Config, world: World) -> EvaluationResult | None:
    """What there is to find of a checkpoint; None where its corpus holds nothing out. Collective.

    Args:
        config: of the run, made for these ranks by `for_evaluation`.

    Raises:
        UserError: the config does not go with the ranks, or the corpus or the checkpoint cannot be read.
    """
    degrees = check_config(config, world.size)
    stages, number = resolve_stages(config, world.size), saved.config.curriculum.stages.index(saved.stage)
    stage, longest = stages[number], max(stage.seq_len for stage in stages)
    data_pipeline = DataPipeline(config, prepare(config.data, config.tokenizer), longest)
    shape = saved.model_args(type(next(iter(registry.architecture(config.model).flavors.values()))))
    model = ParallelModel(config, world, Meshes(world.device.device.type, degrees), shape, stage, longest)
    load_weights(saved, model.parts)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f} batches"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=world.rank != 0,
    )
    task = bar.add_task("reading", total=None)
    evaluator = Evaluator(
        model, data_pipeline, config.evaluation, stages[0], lambda what: bar.update(task, advance=1, description=what)
    )
    with bar:
        return evaluator.evaluate(stage, model.configure_stage(stage), at_end=True, short_before=saved.short_loss)


def for_evaluation(config: Config, ranks: int, options: argparse.Namespace) -> Config:
    """The run's config for ranks that share every sequence, without what only training needs."""

    def alone(stage: Stage) -> Stage:
        own = {"cp": None, "strategy": None, "tp": None, "pp": None, "activation": StageActivation()}
        tokens = stage.seq_len * config.training.micro_batch_sequences
        return replace(stage, **own, steps=1, tokens=0, until={}, global_batch_tokens=tokens)  # type: ignore[arg-type]

    given = {name: getattr(options, name) for name in ("variants", "lengths", "depths", "trials")}
    passkey = replace(config.evaluation.passkey, **{name: value for name, value in given.items() if value is not None})
    settings: dict[str, Any] = {"max_share": 1.0, "passkey": passkey}
    if options.tokens:
        settings["tokens"] = options.tokens
    stages = tuple(alone(stage) for stage in config.curriculum.stages)
    return replace(
        config,
        evaluation=replace(config.evaluation, **settings),
        curriculum=replace(config.curriculum, stages=stages),
        parallel=Parallel(cp=ranks),
        context_parallel=ContextParallel(kernel=config.context_parallel.kernel),
        training=replace(config.training, float8="none"),
        optimizer=Optimizer(),
        activation=Activation(),
        compile=Compile(),
    )


def write(out: Path, saved: SavedModel, found: EvaluationResult) -> None:
    """evaluation.json and a picture of each kind of prompt and of loss by position."""
    out.mkdir(parents=True, exist_ok=True)
    about = {"checkpoint": str(saved.path), "stage": saved.stage.name, "seq_len": saved.stage.seq_len}
    (out / "evaluation.json").write_text(json.dumps({**about, **found.to_json()}, indent=1) + "\n", encoding="utf-8")
    curve = {saved.path.name: (found.position_starts, found.position_losses)}
    imsave(out / "loss_by_position.png", draw_loss_by_position(curve))
    for name, each in found.retrieval.items():
        imsave(out / f"{name}.png", draw_retrieval_map(*each, trained_length=saved.stage.seq_len, title=name))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What is not given is as in [evaluation] of the run's config.toml.\nRun it where "
        "the run was started: the paths of its config lead to its corpus from there.",
    )
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="kinds of prompts")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a prompt, multiples of 2 x ranks")
    parser.add_argument("--depths", type=int, help="places of the key, evenly from top to end")
    parser.add_argument("--trials", type=int, help="prompts for each length and depth")
    parser.add_argument("--tokens", type=int, help="held-out tokens of each loss")
    parser.add_argument("--out", type=Path, help="folder to write (default evaluation/step-N in the run's folder)")
    options = parser.parse_args(arguments)
    options.variants, options.lengths = (None if x is None else tuple(x) for x in (options.variants, options.lengths))
    registry.register(ARCHITECTURES)
    if "RANK" not in os.environ:
        dist.init_process_group(find_device().backend, store=dist.HashStore(), rank=0, world_size=1)
    world = start_ranks(WAIT_SECONDS)
    try:
        saved = open_saved_model(options.checkpoint, collective=True)
        found = evaluate(saved, for_evaluation(saved.config, world.size, options), world)
    except (UserError, ContextParallelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if world.rank == 0 and found:
        out = options.out or saved.path.parents[1] / "evaluation" / saved.path.name
        write(out, saved, found)
        print("\n".join(found.lines(int(saved.path.name.removeprefix("step-")), saved.stage.seq_len)))
        print(f"written to {out}")
    elif not found:
        print("error: the corpus of this run holds nothing out: data.validation_fraction = 0", file=sys.stderr)
    stop_ranks()
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
