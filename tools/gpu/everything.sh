#!/usr/bin/env bash
# Runs all tests and all measurements on a GPU machine, in the order of their worth.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'USAGE'
usage: tools/gpu/everything.sh [options]

First whatever may share the machine: run_tests.sh, and the engines of the measured models, each in
a process of its own (TensorRT's builder keeps one core busy and the GPU idle). Then what must be
alone: benchmark.sh part by part. Every step leaves a log in FOLDER, and what came of it at once, so
look there meanwhile; an end before its time loses the step that is under way. Exit status: 0 where
every step ended well, else 1. On a machine whose
commands end early, begin it in a session of its own: setsid tools/gpu/everything.sh … &

options:
  --place PLACE      where setup.sh put the environment (default: /tmp/offramp-gpu)
  --output FOLDER    for logs, reports and figures (default: build/gpu)
  --backend NAME     tensorrt or cuda (default: tensorrt)
  --models M,M,…     to measure (default: bert-base,resnet101)
  --build-s SECONDS  after which tests and engines are left as they are (default: 400)
  --soak-s SECONDS   of the long run (default: 300)
USAGE
}

die() { echo "everything: $1" >&2; exit 2; }

place=/tmp/offramp-gpu output=build/gpu backend=tensorrt models=bert-base,resnet101
build_s=400 soak_s=300
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --place|--output|--backend|--models|--build-s|--soak-s)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in
                --place) place=$2 ;;
                --output) output=$2 ;;
                --backend) backend=$2 ;;
                --models) models=$2 ;;
                --build-s) build_s=$2 ;;
                --soak-s) soak_s=$2 ;;
            esac
            shift 2 ;;
        *) usage >&2; die "there is no option $1" ;;
    esac
done
[ -f "$place/env.sh" ] || die "there is no environment at $place: run tools/gpu/setup.sh FOLDER $place"
for seconds in "$build_s" "$soak_s"; do
    case $seconds in ''|*[!0-9]*) die "$seconds is no number of seconds" ;; esac
done
mkdir -p "$output"
output=$(cd "$output" && pwd)

step() {  # NAME COMMAND…: its log, and how it ended
    local name=$1 status
    shift
    "$@" > "$output/$name.log" 2>&1 < /dev/null
    status=$?
    echo "$(date -u +%H:%M:%S) $name ended with $status" >> "$output/steps.txt"
}

run_tests() {  # PART
    step "test-$1" timeout --kill-after=20 $((build_s + 40)) "$here/run_tests.sh" \
        --place "$place" --output "$output/tests-$1" --only "$1" --limit $((build_s / 3))
}

measure() {  # PART MODEL SECONDS [OPTION…]: into a file a model, so that they can be made at once
    step "$1-$2" "$here/benchmark.sh" --place "$place" --limit "$3" --backend "$backend" \
        --only "$1" --models "$2" --output "$output/gpu-$2.json" "${@:4}"
}

: > "$output/steps.txt"
for model in ${models//,/ }; do
    measure models "$model" "$build_s" &
done
for part in kernels engines runtime memcheck synccheck racecheck; do
    run_tests "$part" &
done
wait
run_tests checks  # they look at the device's memory, which is everybody's
for model in ${models//,/ }; do
    measure pame "$model" 200
done
for model in ${models//,/ }; do
    measure parallel "$model" 200
done
measure soak "${models%%,*}" $((soak_s + 60)) --soak-s "$soak_s"
step kernels "$here/benchmark.sh" --place "$place" --limit 120 --only kernels \
    --output "$output/gpu-kernels.json"
cat "$output/steps.txt"
! grep -qv ' ended with 0$' "$output/steps.txt"
