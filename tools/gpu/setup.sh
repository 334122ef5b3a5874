#!/usr/bin/env bash
# Sets up a GPU machine without network, from what collect.sh made.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

usage() {
    cat <<'USAGE'
usage: tools/gpu/setup.sh FOLDER [PLACE]

Makes an environment out of FOLDER/part-00, part-01, … (of tools/gpu/collect.sh), with local wheels
only: Python packages, PyCUDA built against the toolkit that is here, TensorRT. TensorRT that is
here already is preferred. What is done is skipped, so call it again whenever more parts are there.
PLACE (default: /tmp/offramp-gpu) gets all of it, and env.sh, which the other scripts read.

It ends with a table of what is here. Exit status: 0 also where something is missing, if it could
do its own part; 1 where a part is damaged or PyCUDA cannot be built.
USAGE
}

die() { echo "setup: $*" >&2; exit 1; }
say() { echo "== $*"; }

case ${1:-} in
    -h|--help) usage; exit 0 ;;
    '') usage >&2; die "give a FOLDER" ;;
esac
[ $# -le 2 ] || die "FOLDER and PLACE, not $# arguments"
[ -d "$1/part-00" ] || die "$1/part-00 does not exist: carry what collect.sh made there"
folder=$(cd "$1" && pwd)
mkdir -p "${2:-/tmp/offramp-gpu}"
place=$(cd "${2:-/tmp/offramp-gpu}" && pwd)
joined=$place/joined
libraries=''  # what LD_LIBRARY_PATH needs

join_parts() {
    python3 "$here/parts.py" join "$folder" "$joined"
}

driver() {  # the driver may lie where the loader does not look
    python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2> /dev/null && return
    local candidate
    for candidate in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib64/nvidia /usr/lib/wsl/lib; do
        if [ -e "$candidate/libcuda.so.1" ]; then
            libraries=$candidate
            return
        fi
    done
}

toolkit() {  # nvcc may be a script that calls the real one: ask it where it is at home
    local nvcc
    for nvcc in "$(command -v nvcc || true)" "${CUDA_HOME:-/none}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
        if [ -x "$nvcc" ]; then
            cuda=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
            [ -d "$cuda" ] && cuda=$(cd "$cuda" && pwd) && return
        fi
    done
    cuda=''
}

choose_python() {
    site=''
    if python3 -c 'import tensorrt' 2> /dev/null; then
        python=python3
        say "TensorRT is here already, in $(command -v python3)"
    elif [ -f "$joined/3-python.tar.gz" ]; then
        python=$place/python/bin/python3.10
        if [ ! -f "$place/python/.whole" ]; then
            say "Python 3.10"
            rm -rf "$place/python"
            tar -C "$place" -xzf "$joined/3-python.tar.gz"
            touch "$place/python/.whole"
        fi
        libraries=$libraries${libraries:+:}$place/python/lib
        # Its own libraries are older or newer than this machine's: only where there is need.
        if ! LD_LIBRARY_PATH=$libraries "$python" -c 'import ctypes, zlib, bz2, lzma, ssl' 2> /dev/null; then
            libraries=$libraries:$place/python/lib/others
        fi
    else
        python=python3
    fi
    site=$place/site-$(run "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
}

run() { LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"; }
run_with_site() { PYTHONPATH=$site run "$@"; }

install_into_site() {
    local pip
    pip=("$python" -m pip)
    if compgen -G "$joined/1-wheels/pip-*.whl" > /dev/null; then  # that Python has none
        pip=("$python" "$(compgen -G "$joined/1-wheels/pip-*.whl")/pip")
    fi
    run "${pip[@]}" install --quiet --disable-pip-version-check --root-user-action=ignore --no-index \
        --no-deps --no-cache-dir --no-compile --upgrade --target "$site" "$@"
}

install_wheels() {
    local key
    key=$(cd "$joined/1-wheels" && sha256sum ./* | sha256sum | cut -d' ' -f1)
    [ "$(cat "$site/.wheels" 2> /dev/null)" = "$key" ] && return
    say "wheels"
    install_into_site "$joined"/1-wheels/*.whl
    echo "$key" > "$site/.wheels"
}

build_pycuda() {
    [ -d "$site/pycuda" ] && return
    local sdist
    sdist=$(compgen -G "$joined/1-wheels/pycuda-*.tar.gz") || return 0
    if [ -z "$cuda" ]; then
        say "PyCUDA is not built: there is no CUDA toolkit (nvcc)"
        return
    fi
    say "PyCUDA, one to two minutes"
    PATH=$cuda/bin:$PATH run_with_site "$here/pycuda.sh" "$sdist" "$python" "$place/built"
    install_into_site "$place"/built/pycuda-*.whl
}

install_provider() {  # it takes the place of an onnxruntime that is here
    local wheel
    wheel=$(compgen -G "$joined/5-provider/onnxruntime_gpu-*.whl") || return 0
    [ -f "$site/.provider" ] && return
    say "ONNX Runtime with its CUDA provider"
    install_into_site "$wheel"
    # It looks for CUDA's libraries in the packages beside it; here they may be another Python's.
    local packages
    packages=$(run "$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2> /dev/null || true)
    [ -z "$packages" ] || ln -sfn "$packages" "$site/nvidia"
    touch "$site/.provider"
}

install_tensorrt() {
    local archive=$joined/4-tensorrt.tar.zst
    [ -f "$archive" ] && [ ! -f "$site/.tensorrt" ] || return 0
    say "TensorRT"
    run_with_site "$python" "$here/pack.py" unpack "$archive" "$site"
    # The plugin library stayed behind; the bindings and the parser ask for this function of it.
    echo '#include <stdbool.h>
        bool initLibNvInferPlugins(void* logger, const char* space) { return true; }' \
        | gcc -shared -fPIC -x c - -Wl,-soname,libnvinfer_plugin.so.8 \
            -o "$site/tensorrt/libnvinfer_plugin.so.8"
    touch "$site/.tensorrt"
}

unpack_bundles() {
    local archive
    for archive in "$joined"/2-bundles/*.tar.gz; do
        [ -f "$archive" ] || continue
        [ -d "$place/bundles/$(basename "$archive" .tar.gz)" ] && continue
        mkdir -p "$place/bundles"
        tar -C "$place/bundles" -xzf "$archive"
    done
}

write_env() {
    local paths=$site:$repository/src
    if [ "${site##*-}" = 3.10 ]; then
        paths=$site:$here/python310:$repository/src
    fi
    cat > "$place/env.sh" <<ENV
# Written by tools/gpu/setup.sh; read by the scripts beside it.
export OFFRAMP_GPU_PLACE='$place'
export OFFRAMP_GPU_PYTHON='$python'
export PYTHONPATH='$paths'
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH='$libraries'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
ENV
    if [ -n "$cuda" ]; then
        echo "export CUDA_HOME='$cuda' PATH='$cuda/bin':\$PATH" >> "$place/env.sh"
    fi
}

join_parts
if grep -q 3-python "$folder/part-00/manifest.json" && [ ! -f "$joined/3-python.tar.gz" ]; then
    say "Python is in a part that is not here yet: carry the next one, and call this again"
    exit 0
fi
driver
toolkit
choose_python
install_wheels
build_pycuda
install_provider
install_tensorrt
unpack_bundles
write_env
# shellcheck source=/dev/null
source "$place/env.sh"
"$python" -m offramp.tools.gpu.environment
