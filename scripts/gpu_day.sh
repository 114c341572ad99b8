#!/usr/bin/env bash
# What one day with a GPU is for, in pieces of under 9 minutes; the same command goes on where a piece stopped.
#
#   scripts/gpu_day.sh tests|kernels|targets|protocols|sweep|train|all   or one protocol: scripts/gpu_day.sh cake_table13
#
# Needs python3 with torch, triton, transformers, pyyaml, rich and matplotlib (tests: pytest, hypothesis); no network, no
# installation of kvbench, no weights. WHEELS: a folder of wheels for what is missing of these, installed first. Results: results/efficiency, or where $OUT is set, $OUT/efficiency.tar.gz and
# $OUT/<piece>.log. LIMIT: seconds of a piece. ARGS: more key=value for every benchmark, such as ARGS="layers=8".
# TRAIN_ARGS: those of scripts/train_pocket.py, TRAIN_LIMIT: its seconds. KVBENCH_REVISION: the commit, where the copy has no git.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-510}
TRAIN_LIMIT=${TRAIN_LIMIT:-590}
PROTOCOLS="d2o_table12 cake_table13 cake_fig7 ott_fig3 d2o_table5" # what is cheap, or shows most, comes first
TESTS="tests/kernels tests/kvbench/test_cuda_graph.py tests/kvbench/test_host_waits.py"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # large caches leave no holes
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

if [ -n "${WHEELS:-}" ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 1
fi

# The folders stand at the top level, the import names do not: without an installation, links put them together (and the
# checkout itself, which has a folder kvbench too, must not come first).
export PYTHONSAFEPATH=1
if ! $PYTHON -c "import kvbench.kernels.jit, kvbench.policies.policy" 2>/dev/null; then
    HOME_OF_IMPORTS=$(mktemp -d)
    trap 'rm -rf "$HOME_OF_IMPORTS"' EXIT
    mkdir "$HOME_OF_IMPORTS/kvbench"
    ln -s "$PWD"/kvbench/* "$PWD"/{policies,kernels,tasks,conf} "$HOME_OF_IMPORTS/kvbench/"
    export PYTHONPATH="$HOME_OF_IMPORTS:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
    $PYTHON -c "import kvbench.kernels.jit, kvbench.policies.policy" || exit 1
fi

# Where a machine is lent, its own folder outlives a command, but only what is packed comes back.
WORK=results/efficiency LOGS=results/efficiency
if [ -n "${OUT:-}" ]; then
    WORK=${TMPDIR:-/tmp}/kvbench_efficiency LOGS=$OUT
    mkdir -p "$WORK" "$OUT"
    cp -n results/efficiency/*.jsonl "$WORK/" 2>/dev/null
fi
mkdir -p "$WORK" "$LOGS"

pack() { if [ -n "${OUT:-}" ]; then tar -C "$WORK" --exclude='*.pt' -czf "$OUT/efficiency.tar.gz" .; fi; }

# run NAME SECONDS COMMAND...: at most so many seconds, everything it says into a log too
run() {
    local name=$1 seconds=$2 code
    shift 2
    echo "== $name: $*"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$LOGS/$name.log" | tail -n 400
    code=${PIPESTATUS[0]}
    pack
    [ "$code" = 0 ] || echo "== $name ended with $code (124: out of time, the same command goes on)"
    return "$code"
}

# bench NAME SECONDS: a protocol, which starts no cell in the last minute
bench() {
    local start=$(($2 > 120 ? $2 - 60 : $2 / 2))
    # shellcheck disable=SC2086 # several words are meant
    run "$1" "$2" $PYTHON -m kvbench.bench "$1" out="$WORK" seconds="$start" ${ARGS:-}
}

piece() {
    local name began=$SECONDS left failed=0
    case $1 in
    # shellcheck disable=SC2086 # several words are meant
    tests) run tests "$LIMIT" $PYTHON -m pytest -m gpu $TESTS -p no:cacheprovider -q -rs --durations=10 ;;
    train)
        # It minds the clock itself: 8.3 minutes of training and one of evaluation.
        # shellcheck disable=SC2086
        run train "$TRAIN_LIMIT" $PYTHON scripts/train_pocket.py ${TRAIN_ARGS:---larger --device cuda} \
            --out "$WORK/pocket_larger" --export "$LOGS/pocket_larger"
        ;;
    protocols)
        for name in $PROTOCOLS; do
            left=$((LIMIT - SECONDS + began))
            [ "$left" -gt 60 ] || { echo "== out of time before $name: the same command goes on"; break; }
            bench "$name" "$left" || failed=1
        done
        return "$failed"
        ;;
    *) bench "$1" "$LIMIT" ;;
    esac
}

case ${1:-} in
all)
    code=0
    for name in tests kernels targets $PROTOCOLS sweep train; do piece "$name" || code=1; done
    exit "$code"
    ;;
tests | kernels | targets | protocols | sweep | train) piece "$1" ;;
*)
    case " $PROTOCOLS " in
    *" ${1:-none} "*) piece "$1" ;;
    *)
        echo "gpu_day.sh: '${1:-}' is not one of tests, kernels, targets, protocols, sweep, train, all, ${PROTOCOLS// /, }" >&2
        exit 2
        ;;
    esac
    ;;
esac
