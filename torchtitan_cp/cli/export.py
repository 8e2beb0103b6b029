"""`torchtitan-cp export CHECKPOINT OUT` writes a checkpoint in Hugging Face's format."""

import argparse
from pathlib import Path

from safetensors import SafetensorError

from torchtitan_cp.cli.command import run_command
from torchtitan_cp.config import ConfigError
from torchtitan_cp.training.export import export


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights as written (default float32)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a run with [lora], write the whole model instead of its adapters",
    )
    options = parser.parse_args(arguments)

    def write() -> int:
        try:
            export(options.checkpoint, options.out, options.dtype, merge=options.merge)
        except (OSError, SafetensorError) as error:
            problem = f"{options.out} cannot be written: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(problem, fix="free some space, or give the path of a new folder") from None
        print(f"{options.out} is written")
        return 0

    return run_command(write)
