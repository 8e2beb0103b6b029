"""`torchtitan-cp evaluate CHECKPOINT` evaluates a checkpoint: losses, context gain, retrieval by length and depth.

It has no time limit, and writes evaluation.json and PNG images. It runs in one process, or on several ranks
that share every sequence: `torchrun --nproc-per-node 8 -m torchtitan_cp.cli.evaluate CHECKPOINT`.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from matplotlib.image import imsave
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torchtitan_cp.checkpoint.progress import check_identity
from torchtitan_cp.checkpoint.weights import SavedModel, load_weights, open_saved_model
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import at_least
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.errors import name_in_errors
from torchtitan_cp.config.names import VARIANTS, format_tokens
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.evaluation.result import EvaluationResult
from torchtitan_cp.metrics.figures import draw_loss_by_position, draw_retrieval_map
from torchtitan_cp.runtime.device import World, find_device, start_ranks, stop_ranks
from torchtitan_cp.training.preflight import check_kernel
from torchtitan_cp.training.registry import args_from
from torchtitan_cp.training.trainer import Trainer

WAIT_SECONDS = 3600.0


def evaluate(
    saved: SavedModel, config: Config, world: World, number: int | None = None, depths: int | None = None
) -> EvaluationResult:
    """Evaluate a checkpoint. Collective.

    Args:
        config: what `evaluation_config` makes of the run's config for these ranks.
        number: stage, from 0, whose length and text are used; None: the checkpoint's own.
        depths: positions of a planted key; None: as many as in a run.

    Raises:
        UserError: the config does not fit the ranks, the corpus is not the run's, a file cannot be read, or nothing
            is held out.
    """
    trainer = Trainer(config, world, args_from(config.model, saved.sizes), trains=False)
    # Of another corpus, text that was trained on may be held out now.
    identity = {name: value for name, value in trainer.progress.identity.items() if name.startswith("data")}
    check_identity(saved.progress.identity, identity, saved.path, "run this in the folder where training was started")
    stage = trainer.stages[saved.stage_index if number is None else number]
    load_weights(saved, trainer.model.parts)
    if depths:
        trainer.evaluator.depths = depths
    columns = SpinnerColumn(), TextColumn("{task.completed:.0f} batches"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=world.rank != 0) as bar:
        task = bar.add_task("evaluating", total=None)
        trainer.evaluator.set_activity = lambda _: bar.update(task, advance=1)
        batch_layout = trainer.model.configure_stage(
            trainer.stages[saved.stage_index]
        )  # with the rope it was trained with
        result = trainer.evaluator.evaluate(stage, batch_layout, saved.progress, at_end=True)
    if result is None:
        raise ConfigError(
            "the corpus of this run holds nothing out: data.validation_fraction = 0",
            fix="train a run with a validation_fraction above 0",
        )
    return result


def evaluation_config(config: Config, ranks: int, options: argparse.Namespace) -> Config:
    """The run's config for ranks that share every sequence, with defaults for what only training needs."""

    def without_training(stage: Stage) -> Stage:
        tokens = stage.seq_len * config.training.micro_batch_sequences
        return Stage(stage.name, stage.seq_len, steps=1, global_batch_tokens=tokens, rope=stage.rope, data=stage.data)

    given = {name: getattr(options, name) for name in ("variants", "lengths", "trials")}
    passkey = replace(config.evaluation.passkey, **{name: value for name, value in given.items() if value is not None})
    training_only = ("parallel", "context_parallel", "optimizer", "lr_scheduler", "activation", "compile", "health")
    plain = replace(config, **{name: getattr(Config(), name) for name in (*training_only, "profiling")})
    return plain.with_keys(
        evaluation={"max_share": 1.0, "passkey": passkey, "tokens": options.tokens or config.evaluation.tokens},
        curriculum={"stages": tuple(map(without_training, config.curriculum.stages))},
        parallel={"cp": ranks},
        context_parallel={"kernel": config.context_parallel.kernel},
        training={"float8": "none"},
        checkpoint={"enable": False, "export": "no"},
    )


def write_result(out: Path, saved: SavedModel, stage: Stage, result: EvaluationResult) -> None:
    """Write evaluation.json, and images of loss by position and of each variant of prompts."""
    out.mkdir(parents=True, exist_ok=True)
    name = stage.name or format_tokens(stage.seq_len)
    about = {"checkpoint": str(saved.path), "stage": name, "seq_len": stage.seq_len}
    (out / "evaluation.json").write_text(json.dumps({**about, **result.to_json()}, indent=1) + "\n", encoding="utf-8")
    curve = {saved.name: (result.position_starts, result.position_losses)}
    imsave(out / "loss_by_position.png", draw_loss_by_position(curve))
    for variant, found in result.retrieval.items():
        if not found.by_length():
            continue
        imsave(out / f"{variant}.png", draw_retrieval_map(*found, trained_length=saved.stage.seq_len, title=variant))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Defaults are those of [evaluation] in the run's config.toml, and 5 depths.\nRun it in the "
        "folder where the run was started: paths to the corpus in its config are relative to that.",
    )
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="variants of prompts")
    parser.add_argument(
        "--lengths", nargs="+", type=at_least(1), help="tokens of a prompt; on several ranks multiples of 2 x ranks"
    )
    parser.add_argument("--depths", type=at_least(1), help="how many places of the key, evenly from top to end")
    parser.add_argument("--trials", type=at_least(0), help="prompts for each length and depth")
    parser.add_argument("--tokens", type=at_least(1), help="held-out tokens that each loss is measured on")
    parser.add_argument(
        "--stage", type=int, help="number of the stage whose length and text are used (default its own)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder to write (default evaluation/step-N in the run's folder, step-N-stage-M for another stage)",
    )
    options = parser.parse_args(arguments)
    options.variants, options.lengths = (None if x is None else tuple(x) for x in (options.variants, options.lengths))
    return run_command(lambda: _evaluate(options), on_ranks=True)


def _evaluate(options: argparse.Namespace) -> int:
    """Evaluate on this job's ranks, write and print the result. Returns the exit code."""
    if "RANK" not in os.environ:
        dist.init_process_group(find_device().backend, store=dist.HashStore(), rank=0, world_size=1)
    world = start_ranks(WAIT_SECONDS)
    saved = open_saved_model(options.checkpoint, collective=True)
    if world.rank == 0 and max(options.lengths or (0,)) > saved.stage.seq_len:
        print(saved.length_note, file=sys.stderr)
    stages = saved.config.curriculum.stages
    number = saved.stage_index if options.stage is None else options.stage - 1
    if not 0 <= number < len(stages):
        raise ConfigError(f"--stage {options.stage} does not exist", fix=f"give one of 1 to {len(stages)}")
    other = f"-stage-{number + 1}" * (number != saved.stage_index)
    out = options.out or saved.run_folder / "evaluation" / f"{saved.name}{other}"
    try:  # before the work
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", fix="give another folder with --out") from None
    config = evaluation_config(saved.config, world.size, options)
    try:
        check_kernel(config, args_from(config.model, saved.sizes), world.device.device.type)
    except ConfigError as error:  # the run trained on other devices
        config = config.with_keys(context_parallel={"kernel": "auto"})
        if world.rank == 0:
            print(f"note: {error.message}; 'auto' is used", file=sys.stderr)
    found = evaluate(saved, config, world, number, options.depths)
    if options.lengths and not any(one.by_length() for one in found.retrieval.values()):
        raise ConfigError(
            f"none of --lengths is measured; left out: {'; '.join(found.left_out) or 'all, without --trials'}",
            fix="give lengths that hold a question, with --trials above 0",
        )
    if world.rank == 0:
        print("\n".join(found.lines(saved.progress.step, stages[number].seq_len)))
        with name_in_errors(out):
            write_result(out, saved, stages[number], found)
        print(f"written to {out}")
    stop_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
