#!/usr/bin/env bash
# Runs everything that needs a GPU, and the kernels once more under compute-sanitizer.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

usage() {
    cat <<'USAGE'
usage: tools/gpu/run_tests.sh [options]

Runs tests/gpu in the environment that setup.sh made, then the tests of the kernels under
compute-sanitizer's memcheck, racecheck and synccheck. The runtime's tests are run on TensorRT and
on ONNX Runtime's CUDA provider, whichever are there. Each part has a limit of time, and leaves its
log and its JUnit report behind; a table comes last. Exit status: 0 where nothing failed (what is skipped
says why in the table), 1 otherwise, 2 where there is no environment.

options:
  --output FOLDER    for logs and reports (default: build/gpu)
  --place PLACE      where setup.sh put the environment (default: /tmp/offramp-gpu)
  --only PART        kernels, engines, runtime, checks (what eeserve --self-check does, and what
                     every backend has to hold), memcheck, racecheck or synccheck; may be repeated
                     (default: all)
  --limit SECONDS    of each part (default: 150; engines, runtime and checks: three times that)
USAGE
}

die() { echo "run_tests: $1" >&2; exit 2; }

output=$repository/build/gpu place=/tmp/offramp-gpu limit=150 parts=()
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --output|--place|--only|--limit)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in
                --output) output=$2 ;;
                --place) place=$2 ;;
                --only) parts+=("$2") ;;
                --limit) limit=$2 ;;
            esac
            shift 2 ;;
        *) usage >&2; die "there is no option $1" ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(kernels memcheck racecheck synccheck checks engines runtime)
case $limit in ''|*[!0-9]*) die "--limit $limit is no number of seconds" ;; esac
[ -f "$place/env.sh" ] || die "there is no environment at $place: run tools/gpu/setup.sh FOLDER $place"
# shellcheck source=/dev/null
source "$place/env.sh"
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$repository" || exit 2

table=()
failed=0

# pytest NAME LIMIT [FILE…] [OPTION…], behind the words of $before
run_part() {
    local name=$1 seconds=$2 began status summary result
    shift 2
    echo "== $name"
    began=$SECONDS
    timeout --kill-after=20 "$seconds" ${before[@]+"${before[@]}"} "$OFFRAMP_GPU_PYTHON" -m pytest \
        -p no:cacheprovider --color=no -o faulthandler_timeout=100 \
        "--junitxml=$output/$name.xml" "$@" \
        2>&1 | tee "$output/$name.log"
    status=${PIPESTATUS[0]}
    # What skipped is told by pytest's last line; all of it skipped is no pass.
    summary=$(grep -E '^(=+ )?[0-9]+ (passed|failed|skipped|error|deselected).* in ' "$output/$name.log" | tail -1 | tr -d '=')
    case $status in
        0) result=passed; [[ $summary == *passed* ]] || result=skipped ;;
        124|137) result="over $seconds s" ;;
        *) result=FAILED ;;
    esac
    case $result in passed|skipped) ;; *) failed=1 ;; esac
    if [ "$result" = skipped ]; then
        summary="$summary: $(sed -n 's/^SKIPPED \[[0-9]*\] [^:]*:[0-9]*: //p' "$output/$name.log" | head -1)"
    fi
    table+=("$(printf '%-10s %-10s %4d s  %s' "$name" "$result" $((SECONDS - began)) "${summary# }")")
}

# Every access of every thread is followed, so few examples, and no second look at the failing.
sanitized() {
    local tool=$1
    if ! command -v compute-sanitizer > /dev/null; then
        table+=("$(printf '%-10s %-10s %4d s  %s' "$tool" skipped 0 'no compute-sanitizer on PATH')")
        return
    fi
    before=(compute-sanitizer --tool "$tool" --error-exitcode 77 --print-limit 20)
    OFFRAMP_GPU_EXAMPLES=15 run_part "$tool" "$limit" tests/gpu/test_kernels.py \
        -q --timeout="$limit" -k 'not 65535 and not more_blocks'
}

for part in "${parts[@]}"; do
    before=()
    case $part in
        kernels) run_part kernels "$limit" tests/gpu/test_kernels.py -q ;;
        engines) run_part engines $((3 * limit)) tests/gpu/test_engines.py -v --durations=5 ;;
        runtime) run_part runtime $((3 * limit)) tests/gpu/test_runtime.py -v --durations=5 ;;
        checks) run_part checks $((3 * limit)) tests/gpu/test_self_check.py \
            tests/unit/engine/test_backend_conformance.py -v --durations=5 ;;
        memcheck|racecheck|synccheck) sanitized "$part" ;;
        *) die "--only $part: give kernels, engines, runtime, checks, memcheck, racecheck or synccheck" ;;
    esac
done

echo
printf '%s\n' "${table[@]}" | tee "$output/tests.txt"
exit $failed
