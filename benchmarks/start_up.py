"""How long it takes from the command to the first optimizer step, and what of it is what."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.benchmark import ROOT, Benchmark, Row

PATIENCE_SECONDS = 300.0


def to_first_step(command: Sequence[str], folder: Path) -> float:
    """Seconds until a job writes down its first step; the job is then stopped.

    Raises:
        RuntimeError: it ended before, or takes too long; with what it printed.
    """
    log, lines = folder / "log", folder / "run" / "metrics.jsonl"
    begun = time.perf_counter()
    with log.open("w") as output:
        job = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (lines.exists() and lines.stat().st_size):
                if job.poll() is not None or time.perf_counter() - begun > PATIENCE_SECONDS:
                    raise RuntimeError(f"no step was taken:\n{log.read_text()[-2000:]}")
                time.sleep(0.02)
            return time.perf_counter() - begun
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()


def measure(config: str, ranks: int, cache: str, rounds: int) -> Iterator[Row]:
    """What run_train.sh does once its environment exists: a check, then torchrun. cache: of the corpus's tokens.

    check_s: the check by itself.
    """
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            overrides = [f"--job.dump_folder={folder / 'run'}", f"--data.cache_folder={Path(cache).resolve()}"]
            check = [sys.executable, "-m", "torchtitan_cp", "check", config, "--ranks", str(ranks), *overrides]
            begun = time.perf_counter()
            subprocess.run(check, cwd=ROOT, check=True, capture_output=True)
            checked = time.perf_counter() - begun
            launch = [sys.executable, "-m", "torchtitan_cp.cli.train", config, "--nproc", str(ranks), *overrides]
            yield {"ranks": ranks, "to_step_1_s": to_first_step(launch, folder), "check_s": checked}


BENCHMARK = Benchmark(
    measure,
    {"config": "train_configs/stdlib_on_cpu.toml", "ranks": 2, "cache": "outputs/cache", "rounds": 3},
    {"rounds": 1},
)
