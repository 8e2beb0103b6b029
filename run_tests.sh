#!/usr/bin/env bash
# Run the tests: environment with the dev extra (once), then pytest on two workers. Arguments go to pytest.
#
#   ./run_tests.sh                                      minutes: every layout, kernel, strategy and fault once
#   ./run_tests.sh --deep                               everything: the full products of them
#   ./run_tests.sh tests/ranks/attention -k ring        a part
#   VENV           virtual environment                  (default: the active one, else .venv)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
EXTRAS="[dev]"
# Compiling 15,000 files takes a minute. Tests import few of them, and Python compiles these as they are first imported,
# once, if it may write what it compiled.
PIP_OPTIONS="--no-compile"
unset PYTHONDONTWRITEBYTECODE
source "$ROOT/launch/environment.sh"
cd "$ROOT"
SELECTED="not deep"
ARGUMENTS=(-n 2 --dist loadgroup)
for argument in "$@"; do
    if [[ "$argument" == --deep ]]; then SELECTED="deep or not deep"; else ARGUMENTS+=("$argument"); fi
done
# Ranks share the cores: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Two threads that wait for each other sleep: at work beside other processes, they would spin in place of these.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
# torch.compile would start two more Pythons in each process, to see whether they load the vector code it builds.
export TORCHINDUCTOR_VEC_ISA_OK="${TORCHINDUCTOR_VEC_ISA_OK:-1}"
# And one more that would compile for a GPU beside it.
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
exec "$PYTHON" -m pytest -m "$SELECTED" "${ARGUMENTS[@]}"
