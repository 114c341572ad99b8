#!/usr/bin/env bash
# What a day with a GPU is for, in pieces of under 9 minutes; the same command goes on where a piece stopped.
#
#   scripts/gpu_day.sh next        whatever is not done yet, in the order of worth, until LIMIT: again and again is a day
#   scripts/gpu_day.sh tests|kernels|targets|sweep|train      or one protocol: scripts/gpu_day.sh cake_table13
#
# Exit code 75: something is left. `train` needs two pieces or three: it trains for 8.3 minutes, exports, evaluates.
#
# Needs python3 with torch, triton, transformers, pyyaml, rich, scipy and matplotlib (tests: pytest, hypothesis); no
# network, no installation of kvbench, no weights. WHEELS: a folder of wheels for what is missing of these.
#
# Results: results/efficiency/<GPU>. Where $OUT is set (a machine that may be another one the next time) they are
# packed as they come, every half minute, into $OUT/efficiency.tar.gz; before the next command
#   tar -C results/efficiency -xzf efficiency.tar.gz
# puts them where that command finds them. To measure a protocol anew, remove its .jsonl there. A training that is not at
# its end comes back in parts, $OUT/travelling.00 and so on, which
#   mkdir -p results/efficiency/<GPU>/pocket_larger && cat travelling.?? >results/efficiency/<GPU>/pocket_larger/checkpoint.pt
# puts together (48 MiB: momenta rounded); where the machine is still the same one, its own checkpoint is gone on from.
#
# LIMIT: seconds of a command. ARGS: more key=value for every benchmark, such as ARGS="layers=8". WORKERS: test processes
# (with pytest-xdist). TESTS, MARK: other tests. TRAIN_ARGS: of scripts/train_pocket.py. KVBENCH_REVISION: the commit,
# where the copy has no git.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
PROTOCOLS="cake_table13 cake_fig7 ott_fig3 d2o_table12 d2o_table5"
NEXT="tests kernels targets $PROTOCOLS sweep"
TESTS=${TESTS:-"tests/kernels tests/kvbench/test_cuda_graph.py tests/kvbench/test_host_waits.py
    tests/kvbench/test_device_memory.py tests/kvbench/test_saving.py"}
AGAIN=75 # exit code of a benchmark that has cells left
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

pieces=" $NEXT train next "
case "$pieces" in
*" ${1:-none} "*) ;;
*)
    echo "gpu_day.sh: '${1:-}' is not one of next, ${NEXT// /, }, train" >&2
    exit 2
    ;;
esac

if [ -n "${WHEELS:-}" ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 1
fi

# The folders stand at the top level, the import names do not: without an installation, links put them together (and the
# checkout itself, which has a folder kvbench too, must not come first).
export PYTHONSAFEPATH=1
SCRATCH=$(mktemp -d)
trap 'kill "${PACKER:-}" 2>/dev/null; rm -rf "$SCRATCH"' EXIT
mkdir "$SCRATCH/kvbench"
ln -s "$PWD"/kvbench/* "$PWD"/{policies,kernels,tasks,conf} "$SCRATCH/kvbench/" 2>/dev/null
export PYTHONPATH="$SCRATCH:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"

# Large caches leave no holes where segments grow; a machine whose driver cannot do that does without.
CHECK='import torch, kvbench.kernels.jit, kvbench.policies.policy
if torch.cuda.is_available(): torch.ones(2**28, device="cuda").sum().item()
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
if ! DEVICE=$($PYTHON -c "$CHECK" | tail -n 1); then
    echo "== without PYTORCH_ALLOC_CONF=$PYTORCH_ALLOC_CONF"
    unset PYTORCH_ALLOC_CONF
    DEVICE=$($PYTHON -c "$CHECK" | tail -n 1) || exit 1
fi
PLACE=$(tr -cs 'a-z0-9' _ <<<"${DEVICE,,}") && PLACE=${PLACE%_}
echo "== on $DEVICE"

# Where a machine is lent, its own folder outlives a command, but only what is packed comes back.
HOME_OF_RESULTS=results/efficiency
if [ -n "${OUT:-}" ]; then
    HOME_OF_RESULTS=${TMPDIR:-/tmp}/kvbench_efficiency
    mkdir -p "$HOME_OF_RESULTS" "$OUT"
    cp -rn results/efficiency/. "$HOME_OF_RESULTS/" 2>/dev/null
fi
WORK=$HOME_OF_RESULTS/$PLACE
CODE=$(find kernels policies kvbench tests scripts -name '*.py' | sort | xargs cat | sha1sum | cut -c1-12)
mkdir -p "$WORK/logs" "$WORK/done"

pack() {
    [ -n "${OUT:-}" ] || return 0
    tar -C "$HOME_OF_RESULTS" --exclude='*.pt' --exclude=model --exclude=README.md -czf "$SCRATCH/packed" . 2>/dev/null
    mv "$SCRATCH/packed" "$OUT/efficiency.tar.gz"
}

# What training left: the model, or where it is not at its end a checkpoint in parts that may come back
send_trained() {
    local place=$WORK/pocket_larger
    [ -n "${OUT:-}" ] || return 0
    if [ "$1" = 0 ]; then
        cp -r "$place/model" "$OUT/pocket_larger"
    elif [ -f "$place/travelling.pt" ]; then
        split -b 15m -d -a 2 "$place/travelling.pt" "$OUT/travelling."
    fi
}
(while sleep 30; do pack; done) >/dev/null 2>&1 & # whoever waits for all output does not wait for its sleep
PACKER=$!

# run NAME SECONDS COMMAND...: at most so many seconds; all it says goes into a log, its end to the screen
run() {
    local name=$1 seconds=$2 code
    shift 2
    echo "== $name, at most $seconds s: $*"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee -a "$WORK/logs/$name.log" |
        grep -vE ' PASSED |^tests/[^ ]+::.*[^D] $' | tail -n 100
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || echo "== $name ended with $code (124: out of time, $AGAIN: something is left: the same command goes on)"
    return "$code"
}

# bench NAME SECONDS: a protocol, which starts no cell in the last minute; again where its process lost the device
bench() {
    local began=$SECONDS left=$2 code
    while :; do
        # shellcheck disable=SC2086 # several words are meant
        run "$1" "$left" $PYTHON -m kvbench.bench "$1" out="$WORK" seconds=$((left > 120 ? left - 60 : left / 2)) ${ARGS:-}
        code=$?
        left=$(($2 - SECONDS + began))
        [ "$code" = "$AGAIN" ] && [ "$left" -gt 90 ] || return "$code"
    done
}

# tests SECONDS: those that have not passed with this code
tests() {
    local log=$WORK/logs/tests_$CODE.log passed=$SCRATCH/passed more=() code
    touch "$log"
    # a line is "[gw0] [ 5%] PASSED tests/x.py::test[a b] ", without workers "tests/x.py::test[a b] PASSED [ 5%]"
    sed -nE 's/^.*PASSED (tests\/[^ ]+::.*[^ ]) *$/--deselect=\1/p; s/^(tests\/[^ ]+::.*) PASSED .*$/--deselect=\1/p' \
        "$log" | sort -u >"$passed"
    echo "== $(wc -l <"$passed") tests have passed with this code before"
    $PYTHON -c "import xdist" 2>/dev/null && more+=(-n "${WORKERS:-8}" --dist worksteal --max-worker-restart 20)
    $PYTHON -c "import pytest_timeout" 2>/dev/null && more+=(--timeout 120)
    # shellcheck disable=SC2086
    run "tests_$CODE" "$1" $PYTHON -m pytest -m "${MARK:-gpu}" $TESTS "@$passed" "${more[@]}" -o addopts= \
        --import-mode=importlib -p no:cacheprovider -v -rfEs --tb=short --durations=10
    code=$?
    return $((code == 5 ? 0 : code)) # 5: all of them have passed before
}

# train SECONDS: a piece of the training, which minds the clock itself and ends well before it is ended
train() {
    local resume=() code
    [ -f "$WORK/pocket_larger/checkpoint.pt" ] && resume=(--resume)
    # shellcheck disable=SC2086
    run train "$1" $PYTHON scripts/train_pocket.py --larger ${TRAIN_ARGS:---device cuda} "${resume[@]}" \
        --piece $(($1 > 240 ? $1 - 90 : $1 * 5 / 8)) --out "$WORK/pocket_larger"
    code=$?
    send_trained "$code"
    return "$code"
}

# piece NAME SECONDS
piece() {
    case $1 in
    tests) tests "$2" ;;
    train) train "$2" ;;
    *) bench "$1" "$2" ;;
    esac
}

case $1 in
next)
    failed=0
    for name in $NEXT; do
        [ "$(cat "$WORK/done/$name" 2>/dev/null)" = "$CODE" ] && continue
        left=$((LIMIT - SECONDS))
        [ "$left" -gt 90 ] || { echo "== out of time before $name: the same command goes on" && break; }
        [ "$name" = tests ] && left=$((left > 300 ? 300 : left))
        piece "$name" "$left"
        code=$?
        [ "$code" -le 1 ] && echo "$CODE" >"$WORK/done/$name"
        [ "$code" = 0 ] || failed=1
    done
    ;;
*) piece "$1" $((LIMIT - SECONDS)) && failed=0 || failed=$? ;;
esac
pack
exit "$failed"
