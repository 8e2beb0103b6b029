"""What torchrun starts on every rank: read the config, build the Trainer, run it."""

import argparse
import logging
import os
import sys

from rich.console import Console

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.config import UserError, load_config
from torchtitan_cp.config.reference import as_text
from torchtitan_cp.health import NonFiniteError
from torchtitan_cp.parallel import start_ranks, stop_ranks
from torchtitan_cp.parallel.failure import LostRankError, name_lost_ranks
from torchtitan_cp.parity import verify_parity
from torchtitan_cp.planner.dry_run import dry_run, print_walks
from torchtitan_cp.preflight import preflight
from torchtitan_cp.registry import register
from torchtitan_cp.trainer import Trainer

BAD_INPUT, HALTED, LOST_RANK, PARITY_BROKEN = 2, 3, 4, 5


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a config. Any key can be overridden: --section.key=value",
        epilog="keys and their defaults:\n\n" + as_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", default="train_configs/quickstart.toml", help="TOML file")
    parser.add_argument("--check", type=int, metavar="RANKS", help="only say whether it would run on so many ranks")
    parser.add_argument(
        "--verify-parity",
        nargs="?",
        const=0,
        type=int,
        metavar="LENGTH",
        help="train nothing: compare the first step, cut to LENGTH tokens, with one rank; exit code 5: it differs",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: one step of each stage as one rank of a job, without devices",
    )
    parser.add_argument("--world-size", type=int, default=1, help="with --dry-run: ranks of the job")
    parser.add_argument("--rank", type=int, default=0, help="with --dry-run: which of them to be")
    options, overrides = parser.parse_known_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format=f"[rank {rank}] %(message)s")
    register(ARCHITECTURES)
    try:
        config = load_config(options.config, overrides)
        if options.check is not None:
            print(f"{options.config}: {preflight(config, options.check)}")
            return 0
        if options.dry_run:
            print_walks(Console(), dry_run(config, options.world_size, options.rank), options.world_size, options.rank)
            return 0
        with name_lost_ranks(config.job.timeout_seconds):
            world = start_ranks(config.job.timeout_seconds)
            if options.verify_parity is not None:
                holds = verify_parity(config, world, options.verify_parity)
                stop_ranks()
                return 0 if holds else PARITY_BROKEN
            Trainer(config, world).run()
            stop_ranks()
    except (UserError, ContextParallelError) as error:
        return _complain(rank, f"{options.config}: {error}", BAD_INPUT)
    except NonFiniteError as error:
        return _complain(rank, str(error), HALTED)
    except LostRankError:
        return LOST_RANK
    return 0


def _complain(rank: int, message: str, code: int) -> int:
    if rank == 0:
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
