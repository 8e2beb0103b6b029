"""Checkpoints in Hugging Face's format: one when it is asked for, or the ends of stages while a run goes on."""

import json
import logging
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.checkpoint import CheckpointManager
from torchtitan_cp.checkpoint.hub import GIB, hub_names, rope_parameters, save_hub_weights
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.sections import Model, Rope
from torchtitan_cp.data.corpus.cache import tokenizer_of
from torchtitan_cp.data.corpus.tokenizer import Tokenizer, tokenizer_files
from torchtitan_cp.runtime.watchdog import set_activity
from torchtitan_cp.training.registry import architecture, hub_of

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
LOOK_SECONDS = 1.0


def check_exportable(config: Config, args: Any) -> None:
    """Refuse checkpoint.export of a model that the format has no words for.

    Raises:
        ConfigError: naming what it has no words for.
    """
    if config.checkpoint.export != "no":
        _described(config.model, args)


def _described(model: Model, args: Any) -> dict[str, Any]:
    """The sizes as config.json says it."""
    try:
        return hub_of(model).config(args)
    except ValueError as error:
        raise ConfigError(
            f"the model cannot be written in Hugging Face's format: {error}",
            fix='train one without it, with checkpoint.export = "no"',
        ) from None


@contextmanager
def exported_stages(folder: Path, dtype: str, tokenizer: Tokenizer) -> Iterator[threading.Event]:
    """While it is entered, write what ends a stage to `hub/step-N` from a thread, and what an earlier start left out.

    Yields:
        set it, and at the end nothing more is waited for: the next start writes what is missing.
    """
    hurried, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=_export_stages, args=(folder, dtype, tokenizer, ended), name="export", daemon=True)
    thread.start()
    yield hurried
    ended.set()
    if not hurried.is_set():
        set_activity("writing the last stage in Hugging Face's format", 0, float("inf"))
        thread.join()


def _export_stages(folder: Path, dtype: str, tokenizer: Tokenizer, ended: threading.Event) -> None:
    """What goes wrong is logged and harms nothing."""
    tried: set[Path] = set()
    last = False
    while not last:
        last = ended.wait(LOOK_SECONDS)
        for path in CheckpointManager(folder / "checkpoints").stage_ends():
            out = folder / "hub" / path.name
            if path in tried or out.exists():
                continue
            tried.add(path)
            try:
                export(path, out, dtype, tokenizer)
            except Exception as error:
                logger.error("NO EXPORT of %s: %s. The next start of the run tries again", path, error)
            else:
                logger.info("%s is written, for transformers", out)


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "float32",
    tokenizer: Tokenizer | None = None,
    *,
    max_bytes: int = 5 * GIB,
) -> None:
    """Write weights, config.json, generation_config.json and the tokenizer's files; complete, or nothing.

    Args:
        checkpoint: a step-N folder, or a run's.
        out: does not exist yet.
        dtype: of the weights as written; float32 is as they were trained.
        tokenizer: of the run, if it is at hand.
        max_bytes: of one safetensors file.

    Raises:
        UserError: no checkpoint, a model that the format cannot say, or OUT is there already.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", fix="give a new folder")
    saved = open_saved_model(checkpoint)
    kind = architecture(saved.config.model)
    hub, args = hub_of(saved.config.model), saved.model_args(type(next(iter(kind.flavors.values()))))
    described = _described(saved.config.model, args)
    tokenizer = tokenizer or tokenizer_of(saved.config.data, saved.config.tokenizer)
    # A tied output is the embedding under another name.
    skipped = {"output.weight"} if args.tie_embeddings else set()
    ours = {
        theirs: (name, entry)
        for name, (size, _) in saved.tensors.items()
        if name not in skipped
        for theirs, entry in hub_names(name, size, hub.names)
    }
    with _complete_or_not_at_all(out) as partial:
        _write_weights(saved, ours, partial, getattr(torch, dtype), max_bytes)
        _write_settings(saved, described, args.head_dim, tokenizer, dtype, partial)


@contextmanager
def _complete_or_not_at_all(out: Path) -> Iterator[Path]:
    """Yields a folder to fill. After a failure nothing of it is left: its room may be what the checkpoints lack."""
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_weights(
    saved: SavedModel, ours: dict[str, tuple[str, int | None]], out: Path, dtype: torch.dtype, max_bytes: int
) -> None:
    """Write the weights.

    Args:
        ours: their name -> our parameter, and which entry of its first dim it is; None: all of it.
    """

    def read(names: list[str]) -> dict[str, Tensor]:
        values = saved.read(list({ours[theirs][0] for theirs in names}))
        pieces = {theirs: (values[name], entry) for theirs in names for name, entry in (ours[theirs],)}
        # Of a stack each has memory of its own, as the format wants.
        return {
            theirs: value.to(dtype) if entry is None else value[entry].to(dtype, copy=True)
            for theirs, (value, entry) in pieces.items()
        }

    shapes = {theirs: saved.tensors[name][0][0 if entry is None else 1 :] for theirs, (name, entry) in ours.items()}
    sizes = [(theirs, math.prod(shape) * dtype.itemsize) for theirs, shape in shapes.items()]
    save_hub_weights(out, sizes, read, max_bytes)


def _write_settings(
    saved: SavedModel, described: dict[str, Any], head_dim: int, tokenizer: Tokenizer, dtype: str, out: Path
) -> None:
    """config.json with the trained length and rotary embedding, and what the run's start or its tokenizer brings."""
    start = Path(saved.config.model.hub_checkpoint).expanduser() if saved.config.model.hub_checkpoint else None
    before: dict[str, Any] = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id}
    if start:
        before = json.loads((start / "config.json").read_text(encoding="utf-8"))
        before = {key: value for key, value in before.items() if not key.startswith("rope_") and "dtype" not in key}
    rope = rope_parameters(saved.stage.rope or Rope(), head_dim)
    length = {"max_position_embeddings": saved.stage.seq_len, "rope_parameters": rope, "dtype": dtype}
    # Readers from before transformers 5 look for these.
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope}
    _write_json(out / "config.json", {**before, **described, **length, **older})
    if start and (start / "generation_config.json").is_file():
        shutil.copyfile(start / "generation_config.json", out / "generation_config.json")
    else:
        _write_json(out / "generation_config.json", {"eos_token_id": before.get("eos_token_id", tokenizer.eos_id)})
    for name, path in tokenizer_files(saved.config.tokenizer, tokenizer, start).items():
        shutil.copyfile(path, out / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
