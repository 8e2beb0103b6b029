"""`torchtitan-cp evaluate CHECKPOINT` evaluates a checkpoint: losses, context gain, retrieval by length and depth.

CHECKPOINT is of a run, or in Hugging Face's format, a folder or a name on the hub. There is no time limit. It writes
evaluation.json and PNG images. It runs in one process, or on several ranks that share every sequence:
`torchrun --nproc-per-node 8 -m torchtitan_cp.cli.evaluate CHECKPOINT`.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from matplotlib.image import imsave
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torchtitan_cp.checkpoint.progress import check_identity
from torchtitan_cp.checkpoint.weights import SavedModel, load_weights, open_saved_model
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import at_least
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.errors import name_in_errors
from torchtitan_cp.config.names import VARIANTS, format_tokens
from torchtitan_cp.config.sections import Curriculum, Model, Stage, Tokenizer
from torchtitan_cp.data.corpus.tokenizer_files import find_tokenizers
from torchtitan_cp.evaluation.result import EvaluationResult
from torchtitan_cp.metrics.figures import draw_loss_by_position, draw_retrieval_map
from torchtitan_cp.runtime.device import World, find_device, start_ranks, stop_ranks
from torchtitan_cp.training.adapters import load_base, starts_from_weights
from torchtitan_cp.training.preflight import check_kernel
from torchtitan_cp.training.registry import args_from, hub_config, hub_folder, is_on_hub, model_args_of
from torchtitan_cp.training.trainer import Trainer

WAIT_SECONDS = 3600.0
HUB_TOKENS = 4096  # of a sequence, where no config says how long a checkpoint of Hugging Face is to be evaluated


@dataclass(frozen=True)
class HubCheckpoint:
    """A checkpoint in Hugging Face's format, in place of a SavedModel.

    Attributes:
        path: a folder or a name on the hub.
        config: the text and lengths, with the checkpoint as its model.
        stage_index: of the stage that is evaluated if no other is asked for.
    """

    path: str
    config: Config
    stage_index: int = 0

    @property
    def name(self) -> str:
        """The last part of its path or name."""
        return Path(self.path).resolve().name

    @property
    def run_folder(self) -> Path:
        """Where results go: the current folder, since the checkpoint's own may be a cache."""
        return Path()

    @property
    def stage(self) -> Stage:
        """The stage that is evaluated if no other is asked for."""
        return self.config.curriculum.stages[self.stage_index]

    @property
    def step(self) -> int:
        """No step of a run."""
        return 0

    @property
    def length_note(self) -> str:
        """What the command says if prompts are longer than the stage."""
        return f"note: longer than the {self.stage.seq_len} tokens that the losses are measured on"


def open_hub_checkpoint(path: str, text: Config | None) -> HubCheckpoint:
    """A checkpoint in Hugging Face's format with its own rotary embedding, and its own tokenizer if it has one.

    Args:
        path: a folder or a name on the hub.
        text: a config whose corpus and lengths are used; its architecture too, if it starts from a checkpoint; not its
            [lora], which would round the weights. None: Python's standard library, at the checkpoint's length, up to
            HUB_TOKENS.

    Raises:
        ConfigError: config.json cannot be read.
    """
    chosen = text.model.architecture if text and text.model.hub_checkpoint else "huggingface"
    model = Model(chosen, hub_checkpoint=path)
    if text is None:
        length = min(HUB_TOKENS, hub_config(model).get("max_position_embeddings") or HUB_TOKENS)
        text = Config(curriculum=Curriculum((Stage(seq_len=length, steps=1),)))
    stages = tuple(replace(stage, rope=None) for stage in text.curriculum.stages)
    tokenizer = Tokenizer(bos=text.tokenizer.bos) if find_tokenizers(hub_folder(model)) else text.tokenizer
    config = replace(text, model=model, tokenizer=tokenizer, lora=None).with_keys(curriculum={"stages": stages})
    return HubCheckpoint(path, config)


def is_hub_checkpoint(path: Path) -> bool:
    """Whether it is a folder in Hugging Face's format, or a name on the hub."""
    return (path / "config.json").is_file() or is_on_hub(Model(hub_checkpoint=str(path)))


def evaluate(
    saved: SavedModel | HubCheckpoint,
    config: Config,
    world: World,
    number: int | None = None,
    depths: int | None = None,
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
    if isinstance(saved, HubCheckpoint):
        trainer = Trainer(config, world)  # as a run that starts from it, whose weights are checked before the corpus
        trainer.resume()
        progress = trainer.progress
    else:
        trainer, progress = Trainer(config, world, args_from(config.model, saved.sizes), trains=False), saved.progress
        # Of another corpus, text that was trained on may be held out now.
        same = ("data", "lora", "base weights")
        identity = {name: value for name, value in trainer.progress.identity.items() if name.startswith(same)}
        check_identity(progress.identity, identity, saved.path, "run this in the folder where training was started")
        if config.lora and starts_from_weights(config):
            load_base(trainer.model)
        load_weights(saved, trainer.model.parts)
    stage = trainer.stages[saved.stage_index if number is None else number]
    if depths:
        trainer.evaluator.depths = depths
    columns = SpinnerColumn(), TextColumn("{task.completed:.0f} batches"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=world.rank != 0) as bar:
        task = bar.add_task("evaluating", total=None)
        trainer.evaluator.set_activity = lambda _: bar.update(task, advance=1)
        batch_layout = trainer.model.configure_stage(
            trainer.stages[saved.stage_index]
        )  # with the rope it was trained with
        result = trainer.evaluator.evaluate(stage, batch_layout, progress, at_end=True)
    if result is None:
        raise ConfigError(
            "the corpus holds nothing out: data.validation_fraction = 0",
            fix="set a validation_fraction above 0, for a run before it trains",
        )
    return result


def evaluation_config(config: Config, ranks: int, options: argparse.Namespace) -> Config:
    """The checkpoint's config for ranks that share every sequence, with defaults for what only training needs."""

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


def write_result(out: Path, saved: SavedModel | HubCheckpoint, stage: Stage, result: EvaluationResult) -> None:
    """Write evaluation.json, and images of loss by position and of each variant of prompts."""
    out.mkdir(parents=True, exist_ok=True)
    name = stage.name or format_tokens(stage.seq_len)
    about = {"checkpoint": str(saved.path), "stage": name, "seq_len": stage.seq_len}
    (out / "evaluation.json").write_text(json.dumps({**about, **result.to_json()}, indent=1) + "\n", encoding="utf-8")
    curve = {saved.name: (result.position_starts, result.position_losses)}
    title = f"loss on held-out text, {saved.name}"
    imsave(out / "loss_by_position.png", draw_loss_by_position(curve, title=title))
    for variant, found in result.retrieval.items():
        if not found.by_length():
            continue
        title = f"% of {variant.replace('_', ' ')} right, {saved.name}"
        imsave(out / f"{variant}.png", draw_retrieval_map(*found, trained_length=saved.stage.seq_len, title=title))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan-cp evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Defaults are those of [evaluation] in the run's config.toml, and 5 depths.\nRun it in the "
        "folder where the run was started: paths to the corpus in its config are relative to that.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a run's folder (its newest checkpoint), a step-N folder, or one in Hugging Face's format: a folder or a "
        "name on the hub",
    )
    parser.add_argument(
        "--config",
        help="of a checkpoint in Hugging Face's format: TOML file with the text, lengths and [evaluation]; without it, "
        f"Python's standard library at the checkpoint's length, up to {HUB_TOKENS:,} tokens",
    )
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


def _open(options: argparse.Namespace) -> SavedModel | HubCheckpoint:
    """The checkpoint that is asked for. Collective.

    Raises:
        ConfigError: there is none, or --config is given for that of a run.
    """
    if is_hub_checkpoint(options.checkpoint):
        return open_hub_checkpoint(str(options.checkpoint), load_config(options.config) if options.config else None)
    if options.config:
        raise ConfigError(
            f"--config is for a checkpoint in Hugging Face's format, and {options.checkpoint} is none",
            fix="leave it out: a run's own config says which text it held out",
        )
    return open_saved_model(options.checkpoint, collective=True)


def _evaluate(options: argparse.Namespace) -> int:
    """Evaluate on this job's ranks, write and print the result. Returns the exit code."""
    if "RANK" not in os.environ:
        dist.init_process_group(find_device().backend, store=dist.HashStore(), rank=0, world_size=1)
    world = start_ranks(WAIT_SECONDS)
    saved = _open(options)
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
    if isinstance(saved, HubCheckpoint):
        config, args = config.with_keys(job={"dump_folder": str(out)}), model_args_of(config.model)
    else:
        args = args_from(config.model, saved.sizes)
    try:
        check_kernel(config, args, world.device.device.type)
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
        print("\n".join(found.lines(saved.step, stages[number].seq_len)))
        with name_in_errors(out):
            write_result(out, saved, stages[number], found)
        print(f"written to {out}")
    stop_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
