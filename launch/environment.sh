# Sourced by run_train.sh and run_tests.sh: sets PYTHON to the Python of an environment with everything installed.
# The caller sets EXTRAS (e.g. "[dev]"), and PIP_OPTIONS if it wants any. The environment is VENV, else the active one,
# else .venv.

venv="${VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}"
PYTHON="$venv/bin/python"
made="$venv/.torchtitan-cp-made"              # in every environment that we make
unfinished="$venv/.torchtitan-cp-unfinished"  # and there until it has Python and pip
# The stamp is made of the requirements, so the environment is set up again only when they change.
stamp="$venv/.torchtitan-cp-${EXTRAS:-base}"
wanted="$ROOT $(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | cksum)"

fail() {
    echo "error: $1" >&2
    exit 2
}

has_python() { [ -x "$PYTHON" ] && [ ! -e "$unfinished" ]; }

has_everything() { has_python && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

# Sets `base`, the Python that makes an environment.
find_base() {
    for base in python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$base" >/dev/null && "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            return
        fi
    done
    fail "no Python 3.10 or newer on the PATH; install one, or activate an environment that has it"
}

# Two starts at once would disturb each other's pip, so one waits until the other has closed file descriptor 9 or ended,
# with its pip. By Python, as macOS has no flock command. On a file system without locks nothing waits.
wait_for_other_start() {
    "$base" -c '
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("waiting for another start, which is setting up", sys.argv[1], flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass
' "$venv"
}

make_environment() {
    echo "making a virtual environment in $venv"
    rm -f "$venv"/.torchtitan-cp-*
    touch "$made" "$unfinished"
    "$base" -m venv "$venv" || fail "cannot make $venv (on Debian: apt install python3-venv)"
    rm "$unfinished"
}

install_requirements() {
    # An environment that we did not make keeps its PyTorch, which may be built for its driver, and its setuptools.
    local pins="$venv/.torchtitan-cp-pins.txt" kept=""
    if [ ! -e "$made" ]; then
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
        -c "$pins" -e "$ROOT${EXTRAS:-}" || fail "the requirements could not be installed; pip's message above says why"
    echo "$wanted" >"$stamp"
}

if ! has_everything; then
    has_python && base="$PYTHON" || find_base
    { mkdir -p "$venv" && [ -w "$venv" ]; } 2>/dev/null || fail "cannot write to $venv; set VENV to a folder of your own"
    exec 9>"$venv/.lock"
    wait_for_other_start
    trap 'echo "interrupted; the next start completes $venv" >&2; exit 130' INT
    has_python || make_environment
    has_everything || install_requirements
    trap - INT
    exec 9>&-
fi
