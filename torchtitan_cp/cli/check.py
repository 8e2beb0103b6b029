"""`torchtitan-cp check`: whether a config would run on so many ranks, or what is wrong with it."""

import argparse
import sys

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import UserError, format_error, load_config
from torchtitan_cp.training import registry
from torchtitan_cp.training.resolve import preflight

BAD_INPUT = 2


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
        print(format_error(options.config, error), file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
