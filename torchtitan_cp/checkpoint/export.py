"""`python -m torchtitan_cp.checkpoint.export CHECKPOINT OUT` writes a checkpoint in Hugging Face's format.

An entry point: it knows models, data and the registry, as `train.py` does.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import ARCHITECTURES
from torchtitan_cp.checkpoint.hub import GIB, hub_name, rope_parameters, save_hub_weights
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.config import ConfigError, UserError
from torchtitan_cp.data.cache import tokenizer_of
from torchtitan_cp.data.tokenizer import tokenizer_files
from torchtitan_cp.registry import architecture, hub_of, register

DTYPES = ("float32", "bfloat16")
PARTIAL = ".partial"


def export(checkpoint: Path, out: Path, dtype: str = "float32", most_bytes: int = 5 * GIB) -> None:
    """Write weights, config.json, generation_config.json and the tokenizer's files; complete, or nothing.

    Args:
        checkpoint: a step-N folder, or a run's.
        out: does not exist yet.
        dtype: of the weights as written; float32 is as they were trained.
        most_bytes: of one safetensors file.

    Raises:
        UserError: no checkpoint, a model that the format cannot say, or OUT is there already.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", fix="give a new folder")
    saved = open_saved_model(checkpoint)
    kind = architecture(saved.config.model)
    hub, shape = hub_of(saved.config.model), saved.shape(type(next(iter(kind.flavors.values()))))
    try:
        described = hub.config(shape)
    except ValueError as error:
        raise ConfigError(f"{saved.path} cannot be exported: {error}", fix="export a model without it") from None
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # A tied output is the embedding under another name.
    skipped = {"output.weight"} if shape.tie_embeddings else set()
    ours = {hub_name(name, hub.names): name for name in saved.tensors if name not in skipped}
    _write_weights(saved, ours, partial, getattr(torch, dtype), most_bytes)
    _write_settings(saved, described, shape.head_dim, dtype, partial)
    partial.rename(out)


def _write_weights(saved: SavedModel, ours: dict[str, str], out: Path, dtype: torch.dtype, most_bytes: int) -> None:
    def read(names: list[str]) -> dict[str, Tensor]:
        values = saved.read([ours[name] for name in names])
        return {name: values[ours[name]].to(dtype) for name in names}

    sizes = [(theirs, saved.tensors[name][0].numel() * dtype.itemsize) for theirs, name in ours.items()]
    save_hub_weights(out, sizes, read, most_bytes)


def _write_settings(saved: SavedModel, described: dict[str, Any], head_dim: int, dtype: str, out: Path) -> None:
    """config.json with the trained length and rotary embedding, and what the run's start or its tokenizer brings."""
    start = Path(saved.config.model.hub_checkpoint).expanduser() if saved.config.model.hub_checkpoint else None
    tokenizer = tokenizer_of(saved.config.data, saved.config.tokenizer)
    before: dict[str, Any] = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id}
    if start:
        before = json.loads((start / "config.json").read_text(encoding="utf-8"))
        before = {key: value for key, value in before.items() if not key.startswith("rope_") and "dtype" not in key}
    rope = rope_parameters(saved.stage.rope, head_dim)
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m torchtitan_cp.checkpoint.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights as written")
    options = parser.parse_args(arguments)
    register(ARCHITECTURES)
    try:
        export(options.checkpoint, options.out, options.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
