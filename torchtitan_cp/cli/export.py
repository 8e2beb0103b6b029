"""`torchtitan-cp export CHECKPOINT OUT` writes a checkpoint in Hugging Face's format."""

import argparse
import sys
from pathlib import Path

from models import ARCHITECTURES
from torchtitan_cp.config import UserError
from torchtitan_cp.training.export import export
from torchtitan_cp.training.registry import register


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights as written")
    options = parser.parse_args(arguments)
    register(ARCHITECTURES)
    try:
        export(options.checkpoint, options.out, options.dtype)
    except (UserError, OSError) as error:
        cause = error if isinstance(error, UserError) else f"{options.out} cannot be written: {error.strerror or error}"
        print(f"error: {cause}", file=sys.stderr)
        return 2
    print(f"{options.out} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
