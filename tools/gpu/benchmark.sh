#!/usr/bin/env bash
# Measures kernels and engines on a GPU machine; see benchmark.py, which gets the options.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'USAGE'
usage: tools/gpu/benchmark.sh [--place PLACE] [--limit SECONDS] [options of benchmark.py]

Runs benchmark.py in the environment that setup.sh made at PLACE (default: /tmp/offramp-gpu), for
at most SECONDS (default: 570). What was measured until then is in the JSON file, engines that were
built are kept: the same command goes on. The options of benchmark.py:

USAGE
}

place=/tmp/offramp-gpu limit=570 options=()
while [ $# -gt 0 ]; do
    case $1 in
        --place|--limit)
            [ $# -ge 2 ] || { usage >&2; echo "benchmark: $1 needs a value" >&2; exit 2; }
            if [ "$1" = --place ]; then place=$2; else limit=$2; fi
            shift 2 ;;
        -h|--help) usage; options=(--help); break ;;
        *) options+=("$1"); shift ;;
    esac
done
if [ ! -f "$place/env.sh" ]; then
    [ "${options[0]:-}" = --help ] && exit 0
    echo "benchmark: there is no environment at $place: run tools/gpu/setup.sh FOLDER $place" >&2
    exit 2
fi
# shellcheck source=/dev/null
source "$place/env.sh"
cd "$here/../.."
exec timeout --kill-after=20 "$limit" "$OFFRAMP_GPU_PYTHON" -m offramp.tools.gpu.benchmark \
    ${options[@]+"${options[@]}"}
