#!/usr/bin/env bash
# What a GPU has to show, speed first, in 25 minutes, then what may have broken; each part has its own limit of time.
#
#   benchmarks/cuda.sh OUT                       every part that has not run into OUT yet
#   benchmarks/cuda.sh OUT PART ...              these parts, again if need be
#   benchmarks/cuda.sh OUT --within 580          what fits in so many seconds; the same command goes on from there
#   benchmarks/cuda.sh OUT --summary             what ran, what failed and what did not run, from OUT
#   benchmarks/cuda.sh OUT --share-gpu           parts for two GPUs too, where there is one: their ranks take turns on it
#   benchmarks/cuda.sh OUT --rehearsal           every part on a CPU, in its smallest sizes, with emulated kernels
#   benchmarks/cuda.sh --list                    the parts, with their limits
#   PYTHON   the interpreter that has torch (default python3)
#
# OUT gets results.jsonl (a line a case, written as it comes), summary.md and log.txt. Nothing is installed and no
# network is needed; packages that PYTHONPATH brings are found. Exit code 1 if a part failed or did not run.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$PYTHON" -m benchmarks.cuda --python "$PYTHON" "$@"
