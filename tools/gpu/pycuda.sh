#!/usr/bin/env bash
# Builds PyCUDA's wheel without a driver; for collect.sh and setup.sh.
set -euo pipefail

if [ $# -ne 3 ] || [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    echo "usage: tools/gpu/pycuda.sh SDIST PYTHON FOLDER"
    echo
    echo "Builds a wheel of PyCUDA into FOLDER, out of its SDIST, for PYTHON, which has pip, numpy"
    echo "and setuptools. Takes nvcc and a C++ compiler, and one to two minutes. No network, no GPU."
    [ $# -eq 1 ] && exit 0 || exit 2
fi

# nvcc may be a script that calls the real one: ask it where it is at home.
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
cuda=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
[ -d "$cuda" ] || { echo "pycuda: there is no CUDA toolkit (nvcc) here" >&2; exit 1; }

mkdir -p "$3"
folder=$(cd "$3" && pwd)
build=$folder/.pycuda-build
rm -rf "$build"
mkdir -p "$build/stub"
tar -C "$build" --strip-components=1 -xzf "$1"
# Linked against an empty library of the driver's name: a machine that builds need not have a
# driver, nor the file that a linker looks for. That library gives none of the symbols, so the
# linker must be told to name it all the same.
echo | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o "$build/stub/libcuda.so"
# It waits for the GPU all its life: -O1 compiles in half the time.
cat > "$build/siteconf.py" <<SITECONF
CUDA_ROOT = '$cuda'
CUDADRV_LIB_DIR = ['$build/stub']
CUDA_ENABLE_CURAND = False
CUDA_ENABLE_GL = False
CXXFLAGS = ['-O1', '-w']
SITECONF
export LDFLAGS="-Wl,--no-as-needed ${LDFLAGS:-}"
if ! PATH=$cuda/bin:$PATH "$2" -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --no-cache-dir --wheel-dir "$folder" "$build" > "$folder/pycuda.log" 2>&1; then
    tail -20 "$folder/pycuda.log" >&2
    echo "pycuda: it does not build; all that was said is in $folder/pycuda.log" >&2
    exit 1
fi
rm -rf "$build" "$folder/pycuda.log"
