#!/usr/bin/env bash
# Train a config: environment (once), a check of the config, then train.py on every rank.
#
#   ./run_train.sh [--section.key=value ...]           train_configs/quickstart.toml
#   CONFIG_FILE=my.toml ./run_train.sh --ranks 8        another config and number of ranks
#   ./run_train.sh --help                               every key
#   ./run_train.sh --verify-parity                      compare the first step on all ranks with one rank
#   ./run_train.sh --doctor                             say whether context parallelism is safe for the model
#   ./run_train.sh --dry-run --ranks 8                  run a step of each stage as one of 8 ranks, without devices
#
#   CONFIG_FILE    TOML file                            (default train_configs/quickstart.toml)
#   NPROC          ranks on this node, instead of --ranks of all nodes (default: one per GPU; 2 without a GPU)
#   NNODES         nodes                                (default 1)
#   RDZV_ENDPOINT  host:port of node 0, for NNODES > 1
#   VENV           virtual environment                  (default: the active one, else .venv)
#
# After a rank dies or hangs, all ranks start again from the last checkpoint, up to job.max_restarts times.
# After Ctrl-C, SIGTERM or SIGUSR1 the run finishes its step, saves and ends with exit code 0; the same command resumes
# it. A second Ctrl-C ends it at once.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
EXTRAS=""
source "$ROOT/launch/environment.sh"

case " $* " in
    *" -h "* | *" --help "*) exec "$PYTHON" "$ROOT/train.py" --help ;;
esac
exec "$PYTHON" -m torchtitan_cp.cli.train "${CONFIG_FILE:-$ROOT/train_configs/quickstart.toml}" ${NPROC:+--nproc "$NPROC"} \
    --nnodes "${NNODES:-1}" ${RDZV_ENDPOINT:+--rdzv-endpoint "$RDZV_ENDPOINT"} "$@"
