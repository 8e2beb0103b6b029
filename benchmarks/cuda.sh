#!/usr/bin/env bash
# Every test marked cuda and every GPU benchmark, in parts of under nine minutes each, on a machine with one GPU
# and no network. Tables (.md) and figures (.json) go into a folder; exit code 1 if a part failed or did not run.
#
#   benchmarks/cuda.sh OUT              all parts
#   benchmarks/cuda.sh OUT PART ...     some of them
#   benchmarks/cuda.sh --list           their names
#   PYTHON   the interpreter that has torch (default python3)
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
LIMIT_SECONDS=530
PARTS=(tests kernels-causal kernels-packed kernels-long flex speed-1b speed-8b speed-long)

run_part() {
    local out="$1/$2"
    case "$2" in
        # Without the suite's conftest: these tests need the library alone, and no package of the trainer.
        tests) "$PYTHON" -m pytest --noconftest -q -m cuda tests/unit/attention/test_kernels.py --junitxml "$out.xml" ;;
        kernels-causal) "$PYTHON" -m benchmarks kernels --kernels flash cudnn --lengths 65536 262144 --json "$out.json" ;;
        kernels-packed)
            "$PYTHON" -m benchmarks kernels --kernels flash cudnn --lengths 262144 --ranks 8 64 \
                --masks log-normal '5 % long' --json "$out.json"
            ;;
        kernels-long)
            "$PYTHON" -m benchmarks kernels --kernels flash cudnn --lengths 1048576 --ranks 8 64 --rounds 1 --json "$out.json"
            ;;
        flex)
            "$PYTHON" -m benchmarks kernels --kernels flex cudnn --lengths 65536 --ranks 8 --strategies ring all_gather \
                --masks causal log-normal --json "$out.json"
            ;;
        # These three need the packages of the trainer's [parallel] and [config]: tomli, tomli-w. All need rich.
        speed-1b) "$PYTHON" -m benchmarks training_speed --lengths 8192 32768 131072 --json "$out.json" ;;
        speed-8b) "$PYTHON" -m benchmarks training_speed --flavor 8B --layers 8 --lengths 8192 32768 131072 --json "$out.json" ;;
        speed-long)
            "$PYTHON" -m benchmarks training_speed --lengths 262144 524288 1048576 --modes attention_saved full --tiles 16 \
                --compile 0 --rounds 1 --json "$out.json"
            ;;
        *)
            echo "no part is called $2; there are: ${PARTS[*]}" >&2
            return 2
            ;;
    esac
}

if [ "${1:-}" = "--list" ]; then
    printf '%s\n' "${PARTS[@]}"
    exit 0
fi
if [ $# -lt 1 ]; then
    sed -n '2,9p' "${BASH_SOURCE[0]}"
    exit 2
fi
OUT="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
cd "$ROOT"
export PYTHONPATH="$ROOT" PYTHONUNBUFFERED=1
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "no part ran: $PYTHON sees no CUDA device" >&2
    exit 1
}

export -f run_part
export PYTHON
failed=()
for part in "${@:-${PARTS[@]}}"; do
    begun=$SECONDS
    timeout "$LIMIT_SECONDS" bash -c 'run_part "$@"' part "$OUT" "$part" > >(tee "$OUT/$part.md") 2> >(tee "$OUT/$part.log" >&2)
    code=$?
    case $code in
        0) echo "part $part: ran, $((SECONDS - begun)) s" ;;
        124) echo "part $part: STOPPED at its limit of $LIMIT_SECONDS s, what it had is in $OUT/$part.json" && failed+=("$part") ;;
        *) echo "part $part: FAILED with exit code $code, see $OUT/$part.log" && failed+=("$part") ;;
    esac
done
[ ${#failed[@]} -eq 0 ] || {
    echo "did not run to the end: ${failed[*]}"
    exit 1
}
