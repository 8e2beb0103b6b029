# Sourced by run_train.sh and run_tests.sh: sets PYTHON to the Python of an environment with everything installed.
# The caller sets EXTRAS (e.g. "[dev]"), and PIP_OPTIONS if it wants any. The environment is VENV, else the active one,
# else .venv.

venv="${VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}"

if [ ! -x "$venv/bin/python" ]; then
    base=""
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base="$candidate"
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "error: no Python 3.10 or newer on the PATH; install one, or activate an environment that has it" >&2
        exit 2
    fi
    echo "making a virtual environment in $venv"
    "$base" -m venv "$venv" || { echo "error: cannot make $venv (on Debian: apt install python3-venv)" >&2; exit 2; }
    touch "$venv/.torchtitan-cp-made"
fi
PYTHON="$venv/bin/python"

# The stamp is made of the requirements, so the environment is set up again only when they change.
stamp="$venv/.torchtitan-cp-${EXTRAS:-base}"
wanted="$ROOT $(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    # An environment that we did not make keeps its PyTorch, which may be built for its driver, and its setuptools.
    pins="$venv/.torchtitan-cp-pins.txt" kept=""
    if [ ! -e "$venv/.torchtitan-cp-made" ]; then
        kept="$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)"
    fi
    if [ -n "$kept" ]; then
        { grep -vE '^(torch|setuptools)==' "$ROOT/constraints.txt"; echo "torch==$kept"; } >"$pins"
        echo "installing pinned requirements into $venv, and keeping its PyTorch $kept"
    else
        cp "$ROOT/constraints.txt" "$pins"
        echo "installing pinned requirements into $venv (once; PyTorch may take a few minutes)"
    fi
    # uv creates environments without pip.
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null
    # setuptools warns about every editable installation.
    PYTHONWARNINGS=ignore "$PYTHON" -m pip install --quiet --disable-pip-version-check ${PIP_OPTIONS:-} \
        -c "$pins" -e "$ROOT${EXTRAS:-}" || {
        echo "error: the requirements could not be installed; pip's message above says why" >&2
        exit 2
    }
    echo "$wanted" >"$stamp"
fi
