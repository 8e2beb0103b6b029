"""What the launcher starts on every rank: read the config, build the Trainer, run it."""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # collections during imports find nothing, and take up to a fifth of their time
    SIGINT_HANDLER = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile would end in a traceback

import argparse
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from models import ARCHITECTURES
from torchtitan_cp.attention import ContextParallelError
from torchtitan_cp.checkpoint.save import restore_replaced
from torchtitan_cp.cli.options import at_least, default_ranks, escape_unprintable, parse_with_overrides
from torchtitan_cp.cli.train import add_comparison_arguments
from torchtitan_cp.config import Config, UserError, format_error, load_config
from torchtitan_cp.config.errors import format_os_error
from torchtitan_cp.config.reference import as_text
from torchtitan_cp.config.run_folder import CHECKPOINTS
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.health.recovery import NonFiniteError
from torchtitan_cp.planner.dry_run import dry_run, print_walks
from torchtitan_cp.runtime.consistency import check_same_job
from torchtitan_cp.runtime.device import World, start_ranks, stop_ranks
from torchtitan_cp.runtime.environment import PLACE, forget_rank
from torchtitan_cp.runtime.job_notes import ask_for_relaunch, end_job, note_stop
from torchtitan_cp.runtime.lock import run_dir_lock
from torchtitan_cp.runtime.signals import any_rank
from torchtitan_cp.runtime.watchdog import LOST_RANK, LostRankError, Watchdog, report_lost_ranks, set_activity
from torchtitan_cp.training.doctor import run_doctor
from torchtitan_cp.training.parity import verify_parity
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer

BAD_INPUT, HALTED, CHECK_FAILED = 2, 3, 5
LOST_LAUNCHER = (
    "error: the launcher of this job's ranks, or of those of a node, was killed; they have stopped and saved; the same "
    "command resumes"
)
ROOT = Path(__file__).parent
SOURCES = (ROOT / "train.py", ROOT / "models", ROOT / "torchtitan_cp")
# Several beats within a time limit distinguish a silent rank from a slow one.
BEATS, MAX_BEAT_SECONDS = 8, 5.0


class StderrHandler(logging.StreamHandler):
    """Writes to the current sys.stderr, which a progress bar replaces to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def main(arguments: list[str]) -> int:
    escape_unprintable()
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a config. Any key can be overridden: --section.key=value",
        epilog="keys and their defaults:\n\n" + as_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", default="train_configs/quickstart.toml", help="TOML file")
    add_comparison_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: one step of each stage as one rank of a job, without devices",
    )
    parser.add_argument(
        "--ranks",
        "--world-size",
        type=at_least(1),
        help="with --dry-run: of the job (default: what run_train.sh would use)",
    )
    parser.add_argument("--rank", type=at_least(0), default=0, help="with --dry-run: rank to simulate")
    options, overrides = parse_with_overrides(parser, arguments)
    if options.ranks is not None and not options.dry_run:
        parser.error("--ranks needs --dry-run here; run_train.sh and torchtitan-cp train start so many ranks")
    rank = int(os.environ.get("RANK", "0"))
    if options.dry_run or not os.environ.keys() >= set(PLACE):
        forget_rank()  # of another job, whose rank 0 would not say what is wrong here
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[rank {rank}] %(message)s", handlers=[StderrHandler()])
    register(ARCHITECTURES)
    try:
        config = load_config(options.config, overrides)
        if rank == 0:
            logging.getLogger("torchtitan_cp").setLevel(config.job.log_level.upper())
        if options.dry_run:
            ranks = options.ranks or default_ranks()
            print_walks(Console(markup=False), dry_run(config, ranks, options.rank), ranks, options.rank)
            return 0
        longest = max(config.job.startup_timeout_seconds, config.job.timeout_seconds, config.checkpoint.timeout_seconds)
        with report_lost_ranks():
            world = start_ranks(longest)
        if options.verify_parity is not None:
            healthy = verify_parity(config, world, options.verify_parity)
        elif options.doctor is not None:
            healthy = run_doctor(config, world, options.doctor)
        else:
            healthy = True
            if not run(config, world):
                return end_job(LOST_LAUNCHER, LOST_RANK)
        if not healthy:
            return end_job("", CHECK_FAILED)
        stop_ranks()
    except (UserError, ContextParallelError) as error:
        return end_job(format_error(options.config, error), BAD_INPUT)
    except PreparationStoppedError as stopped:
        note_stop()
        if rank == 0:
            print(stopped, file=sys.stderr)
    except NonFiniteError as error:
        return end_job(f"error: {error}", HALTED)
    except LostRankError:
        return LOST_RANK
    except OSError as error:
        # The launcher makes another attempt, which may succeed, unlike one with a wrong config.
        print(f"[rank {rank}] {format_os_error(error)}", file=sys.stderr)
        logging.getLogger(__name__).debug("raised here:", exc_info=True)
        return 1
    return 0


def run(config: Config, world: World) -> bool:
    """Train under a watchdog, as the only job on the run's folder.

    Returns:
        False if the run was stopped and saved because a node lost its launcher. The same on every rank.
    """
    settings = config.job
    set_activity("reading the corpus and building the model", 0, settings.startup_timeout_seconds)
    beat_seconds = min(MAX_BEAT_SECONDS, settings.timeout_seconds / BEATS)
    with Watchdog(world.rank, world.size, beat_seconds, settings.dump_folder) as watch, report_lost_ranks(watch):
        check_same_job(config, SOURCES)
        with run_dir_lock(settings.dump_folder):
            if world.rank == 0:  # the others wait for what it finds
                restore_replaced(Path(settings.dump_folder, CHECKPOINTS))
            trainer = Trainer(config, world)
            trainer.run()
            if trainer.stopping:
                note_stop()
            elif trainer.needs_relaunch:
                ask_for_relaunch()
            # Only where no rank waits for an export, which may take longer than a collective.
            return not (trainer.stopping and any_rank(watch.lost_launcher, device=world.device.device)[0])


def worker_main() -> None:
    """Run as the rank that the environment names, with the arguments in sys.argv. Does not return after a failure."""
    gc.freeze()  # what was imported, so that later collections leave it out
    gc.enable()
    with suppress(OSError):  # the name of the process in top and ps, on Linux
        Path("/proc/self/comm").write_text(f"rank {os.environ.get('RANK', '0')}")
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still wait for another rank, or export. An ordinary end of Python would abort those that are in torch.
    if code or threading.active_count() > 1:
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, SIGINT_HANDLER)
    worker_main()
