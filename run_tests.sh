#!/usr/bin/env bash
# Run the tests: environment with the dev extra (once), then pytest. Arguments go to pytest.
#
#   ./run_tests.sh                                      everything
#   ./run_tests.sh tests/ranks/attention -k ring        a part
#   VENV           virtual environment                  (default: the active one, else .venv)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
EXTRAS="[dev]"
source "$ROOT/launch/environment.sh"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
