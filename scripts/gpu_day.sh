#!/usr/bin/env bash
# What a day with a GPU is for, in pieces of under 9 minutes; the same command goes on where a piece stopped.
#
#   scripts/gpu_day.sh next        whatever is not done yet, in the order of worth, until LIMIT: again and again is a day
#   scripts/gpu_day.sh PIECE       one of them: tests sanitizer steps first_cases round targets, a protocol, tests_all, train
#   DRY=1 scripts/gpu_day.sh next  only says what it would run
#
# The first six pieces take three commands by arithmetic, none was timed yet: tests of selection, compaction, window
# statistics and quantised kernels; memcheck and racecheck of a small case of each; a decoding step, profiled, eager and
# graphed; decode attention, ragged too, column sums at 32k and groups of 32; one round of a sweep; targets. Exit code
# 75: something is left. A piece that is red is not done: it comes again after all others. One that ran out of time is
# red only the second time. `train` trains the larger pocket model in pieces.
#
# Needs python3 with torch, triton, transformers, pyyaml, rich, scipy and matplotlib (tests: pytest, hypothesis); no
# network, no installation of kvbench, no weights. WHEELS: a folder of wheels for what is missing of these.
#
# Results: results/efficiency/<GPU>. Where $OUT is set (a machine that may be another one the next time) they are
# packed as they come, every half minute, into $OUT/efficiency.tar.gz; before the next command
#   tar -C results/efficiency -xzf efficiency.tar.gz
# puts them where that command finds them. To measure a protocol anew, remove its .jsonl there.
#
# LIMIT: seconds of a command. ARGS: more key=value for every benchmark, such as ARGS="layers=8". WORKERS: test processes
# (with pytest-xdist). TESTS, MARK: other tests. TRAIN_ARGS: of scripts/train_pocket.py. KVBENCH_REVISION: the commit,
# where the copy has no git (without it figures name a digest of the code).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
NEXT="tests sanitizer steps first_cases round targets cake_table13 cake_fig7 ott_fig3 d2o_table12 d2o_table5 kernels sweep tests_all"
FIRST_TESTS=$(ls tests/kernels/test_{selection,compaction,window,quantised}*.py)
ALL_TESTS="tests/kernels tests/kvbench/test_cuda_graph.py tests/kvbench/test_host_waits.py
    tests/kvbench/test_device_memory.py tests/kvbench/test_saving.py"
SMALL="test_selection.py::test_a_cuda_device_gives_what_sorting_gives[3]
    test_compaction.py::test_a_cuda_device_moves_the_same_bits[3]
    test_window_statistics.py::test_a_cuda_device_gives_what_the_reference_gives[100]
    test_window_statistics.py::test_a_cuda_device_finds_the_largest_head_that_the_reference_finds[200]
    test_quantised_attention.py::test_a_cuda_device_gives_what_the_reference_gives[small-groups]"
FIRST="only=packed B=,ragged B=,T=32768 H=32/8 D=128,2 bits of 32"
AGAIN=75 # exit code of a benchmark that has cells left
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=$PATH:/usr/local/cuda/bin # compute-sanitizer may lie there

case " $NEXT train next " in
*" ${1:-none} "*) ;;
*)
    echo "gpu_day.sh: '${1:-}' is not one of next, ${NEXT// /, }, train" >&2
    exit 2
    ;;
esac

if [ -n "${WHEELS:-}" ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 1
fi

# Without an installation: the checkout itself, whose folders policies, kernels and tasks bear names of other packages,
# must not come first.
export PYTHONSAFEPATH=1 PYTHONPATH="$PWD/src:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
SCRATCH=$(mktemp -d)
trap 'kill "${PACKER:-}" 2>/dev/null; rm -rf "$SCRATCH"' EXIT

# Large caches leave no holes where segments grow; a machine whose driver cannot do that does without.
CHECK='import torch, kvbench.kernels.jit, kvbench.policies.policy
if torch.cuda.is_available(): torch.ones(2**28, device="cuda").sum().item()
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
if [ -n "${DRY:-}" ]; then
    DEVICE="no GPU"
elif ! DEVICE=$($PYTHON -c "$CHECK" | tail -n 1); then
    echo "== without PYTORCH_ALLOC_CONF=$PYTORCH_ALLOC_CONF"
    unset PYTORCH_ALLOC_CONF
    DEVICE=$($PYTHON -c "$CHECK" | tail -n 1) || exit 1
fi
PLACE=$(tr -cs 'a-z0-9' _ <<<"${DEVICE,,}") && PLACE=${PLACE%_}
echo "== on $DEVICE"

# Where a machine is lent, its own folder outlives a command, but only what is packed comes back.
HOME_OF_RESULTS=results/efficiency
[ -z "${DRY:-}" ] || HOME_OF_RESULTS=$SCRATCH/results
if [ -n "${OUT:-}" ]; then
    HOME_OF_RESULTS=${TMPDIR:-/tmp}/kvbench_efficiency
    mkdir -p "$HOME_OF_RESULTS" "$OUT"
    cp -rn results/efficiency/. "$HOME_OF_RESULTS/" 2>/dev/null
fi
WORK=$HOME_OF_RESULTS/$PLACE
CODE=$(find kernels policies kvbench tests scripts -name '*.py' | sort | xargs cat | sha1sum | cut -c1-12)
export KVBENCH_REVISION=${KVBENCH_REVISION:-code $CODE}
mkdir -p "$WORK/logs" "$WORK/done"

pack() {
    [ -n "${OUT:-}" ] || return 0
    tar -C "$HOME_OF_RESULTS" --exclude='*.pt' --exclude=model --exclude=README.md -czf "$SCRATCH/packed" . 2>/dev/null
    mv "$SCRATCH/packed" "$OUT/efficiency.tar.gz"
}
(while sleep 30; do pack; done) >/dev/null 2>&1 & # whoever waits for all output does not wait for its sleep
PACKER=$!

# run NAME SECONDS COMMAND...: at most so many seconds; all it says goes into a log, its end to the screen
run() {
    local name=$1 seconds=$2 code
    shift 2
    echo "== $name, at most $seconds s: $(printf '%q ' "$@")"
    [ -z "${DRY:-}" ] || return 0
    timeout --kill-after=20 "$seconds" "$@" 2>&1 | tee -a "$WORK/logs/$name.log" |
        grep -vE ' PASSED |^tests/[^ ]+::.*[^D] $' | tail -n 100
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || echo "== $name ended with $code (124: out of time, $AGAIN: something is left: the same command goes on)"
    return "$code"
}

# bench PROTOCOL SECONDS ARGUMENT...: it starts no cell in the last minute; again where its process lost the device
bench() {
    local name=$1 seconds=$2 began=$SECONDS left=$2 code word
    shift 2
    for word in ${ARGS:-}; do
        case "$name $word" in "kernels "[!sd]*) ;; *) set -- "$@" "$word" ;; esac # kernels runs no model
    done
    while :; do
        run "$name" "$left" $PYTHON -m kvbench.bench "$name" out="$WORK" \
            seconds=$((left > 120 ? left - 60 : left / 2)) "$@"
        code=$?
        left=$((seconds - SECONDS + began))
        [ "$code" = "$AGAIN" ] && [ "$left" -gt 90 ] || return "$code"
    done
}

# tests SECONDS FILE...: those that have not passed with this code
tests() {
    local seconds=$1 log=$WORK/logs/tests_$CODE.log passed=$SCRATCH/passed more=() code
    shift
    touch "$log"
    # a line is "[gw0] [ 5%] PASSED tests/x.py::test[a b] ", without workers "tests/x.py::test[a b] PASSED [ 5%]"
    sed -nE 's/^.*PASSED (tests\/[^ ]+::.*[^ ]) *$/--deselect=\1/p; s/^(tests\/[^ ]+::.*) PASSED .*$/--deselect=\1/p' \
        "$log" | sort -u >"$passed"
    echo "== $(wc -l <"$passed") tests have passed with this code before"
    $PYTHON -c "import xdist" 2>/dev/null && more+=(-n "${WORKERS:-8}" --dist worksteal --max-worker-restart 20)
    $PYTHON -c "import pytest_timeout" 2>/dev/null && more+=(--timeout 120 --timeout-method thread) # a hanging kernel too
    run "tests_$CODE" "$seconds" $PYTHON -m pytest -m "${MARK:-gpu}" "$@" "@$passed" "${more[@]}" -o addopts= \
        --import-mode=importlib -p no:cacheprovider -v -rfEs --tb=short --durations=10
    code=$?
    return $((code == 5 ? 0 : code)) # 5: all of them have passed before
}

# sanitizer SECONDS: accesses outside of memory and races in shared memory, of one small case of each kernel. PyTorch's
# own allocator would hide the ends of tensors from it.
sanitizer() {
    local tool red=0
    # shellcheck disable=SC2086 # several words are meant
    set -- "$1" $(printf 'tests/kernels/%s ' $SMALL)
    if ! command -v compute-sanitizer >/dev/null && [ -z "${DRY:-}" ]; then
        echo "== compute-sanitizer is not installed"
        return 0
    fi
    for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$tool" $(($1 / 2)) compute-sanitizer --tool "$tool" --error-exitcode 9 \
            $PYTHON -m pytest "${@:2}" -o addopts= --import-mode=importlib -p no:cacheprovider -v --tb=short || red=$?
    done
    return "$red"
}

# train SECONDS: a piece of the training, which minds the clock itself; at its end the model and its scores
train() {
    local place=$WORK/pocket_larger resume=()
    [ -f "$place/checkpoint.pt" ] && resume=(--resume)
    # shellcheck disable=SC2086 # several words are meant
    run train "$1" $PYTHON scripts/train_pocket.py --larger ${TRAIN_ARGS:---device cuda} "${resume[@]}" \
        --piece $(($1 > 240 ? $1 - 90 : $1 * 5 / 8)) --out "$place" --export "$place/model" || return
    [ -z "${OUT:-}" ] || cp -r "$place/model" "$OUT/pocket_larger"
    run scores $((LIMIT - SECONDS)) $PYTHON scripts/eval_pocket.py "$place/model" --device cuda --out "$place/scores.json"
}

# piece NAME SECONDS
piece() {
    case $1 in
    # shellcheck disable=SC2086 # several words are meant
    tests) tests $(($2 > 300 ? 300 : $2)) ${TESTS:-$FIRST_TESTS} ;;
    # shellcheck disable=SC2086
    tests_all) tests "$2" ${TESTS:-$ALL_TESTS} ;;
    sanitizer) sanitizer "$2" ;;
    first_cases) bench kernels "$2" "$FIRST" ;;
    round) bench sweep "$2" lengths=8192 repeats=1 batches=1 rivals=none ;;
    train) train "$2" ;;
    *) bench "$1" "$2" ;;
    esac
}

# is NAME, mark NAME: what is known of this code: NAME is done, NAME.red, NAME.late
is() { [ "$(cat "$WORK/done/$1" 2>/dev/null)" = "$CODE" ]; }
mark() { echo "$CODE" >"$WORK/done/$1"; }

# what a piece gets nowhere without: two processes under the sanitizer; a round of a sweep, which is one cell
seconds_for() {
    case $1 in
    sanitizer) echo 200 ;;
    round) echo 300 ;;
    *) echo 90 ;;
    esac
}

# those that are not done; red: those too that failed with this code before
some() {
    local name left code
    for name in $NEXT; do
        if is "$name" || { is "$name.red" && [ "$1" != red ]; }; then continue; fi
        left=$((LIMIT - SECONDS))
        if [ "$left" -le "$(seconds_for "$name")" ] && [ "$left" -lt $((LIMIT - 60)) ]; then
            echo "== too little time is left for $name: the same command goes on"
            return 1
        fi
        piece "$name" "$left"
        code=$?
        case $code in
        0) mark "$name" ;;
        "$AGAIN") ;;
        124 | 137) if is "$name.late"; then mark "$name.red"; else mark "$name.late"; fi ;;
        *) mark "$name.red" ;;
        esac
    done
}

failed=0
case $1 in
next)
    some new && [ -z "${DRY:-}" ] && some red
    for name in $NEXT; do is "$name" || failed=$AGAIN; done
    ;;
*) piece "$1" $((LIMIT - SECONDS)) || failed=$? ;;
esac
pack
exit "$failed"
