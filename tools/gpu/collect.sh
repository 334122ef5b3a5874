#!/usr/bin/env bash
# Collects what a GPU machine without network needs, where package registries are reachable.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

usage() {
    cat <<'USAGE'
usage: tools/gpu/collect.sh FOLDER [options]

Collects wheels, and TensorRT where asked, into FOLDER/part-00, part-01, …, to be carried to a GPU
machine without network. There: tools/gpu/setup.sh FOLDER. What is there already is not fetched
again, so a run that was interrupted can be repeated.

options:
  --tensorrt none|8.6.0  none: the GPU machine has TensorRT, or engines are not the matter; it is
                         served by its own Python 3.12. 8.6.0: the newest TensorRT that is whole on
                         PyPI; Python 3.10, which it needs, travels along (default: none)
  --provider VERSION     of onnxruntime-gpu, to serve in ONNX Runtime's CUDA provider: 250 MB; not
                         together with TensorRT 8.6.0, whose Python it does not know
  --wheel FILE           the wheel of TensorRT 8.6.0, if it is here (819 MB to fetch otherwise)
  --python PREFIX        where a Python of the GPU machine's version is installed, with its
                         headers: 3.10 for TensorRT 8.6.0, where it travels along, or 3.12. With
                         it, and nvcc, PyCUDA is built here, which takes two minutes from those on
                         the GPU machine (default: that of python3.10 or python3.12, if any)
  --bundle PATH          a compiled bundle to carry along; may be repeated. benchmark.sh and the
                         tests want the shipped example, as fashion.ee
  --offramp PYTHON       a Python that has offramp's extra compile, to make the small bundles of the
                         tests: torch, which takes part in it, does not travel (default:
                         .venv/bin/python of the repository, if it is there)
  --megabytes N          size of a part (default: 60)
USAGE
}

die() { echo "collect: $*" >&2; exit 1; }
say() { echo "== $*"; }

folder='' tensorrt=none provider='' wheel='' python='' offramp='' megabytes=60 bundles=()
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --tensorrt|--provider|--wheel|--python|--bundle|--megabytes|--offramp)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in
                --tensorrt) tensorrt=$2 ;;
                --provider) provider=$2 ;;
                --wheel) wheel=$2 ;;
                --python) python=$2 ;;
                --bundle) bundles+=("$2") ;;
                --megabytes) megabytes=$2 ;;
                --offramp) offramp=$2 ;;
            esac
            shift 2 ;;
        -*) usage >&2; die "there is no option $1" ;;
        *) [ -z "$folder" ] || die "one FOLDER, not $folder and $1"; folder=$1; shift ;;
    esac
done
[ -n "$folder" ] || { usage >&2; die "give a FOLDER"; }
case $tensorrt in
    none) tag=py312 version=3.12 ;;
    8.6.0) tag=py310 version=3.10 ;;
    *) die "--tensorrt is none or 8.6.0, not $tensorrt" ;;
esac
[ -z "$provider" ] || [ "$tensorrt" = none ] || die "--provider $provider is for Python 3.12: collect it into a folder of its own, without --tensorrt"
case $megabytes in ''|*[!0-9]*) die "--megabytes $megabytes is no number" ;; esac

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
tool=$folder/.tools/bin/python
whole=$folder/.whole  # what the parts are cut from; stays here
mkdir -p "$whole"

tools() {
    "$tool" -c 'import zstandard' 2> /dev/null && return
    say "tools"
    python3 -m venv "$folder/.tools"
    "$tool" -m pip install --quiet --disable-pip-version-check 'pip>=24' zstandard
}

fetch() {  # TARGET WHAT…: wheels for the GPU machine's Python, of what is named and nothing else
    local target=$1
    shift
    "$tool" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "$version" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --dest "$target" "$@"
}

wheels() {
    say "wheels for Python $version"
    mkdir -p "$whole/1-wheels"
    fetch "$whole/1-wheels" --requirement "$here/wheels-$tag.txt"
    if ! compgen -G "$whole/1-wheels/pycuda-*.tar.gz" > /dev/null; then
        "$tool" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary pycuda \
            --dest "$whole/1-wheels" pycuda==2026.1
    fi
}

build_pycuda() {  # where it can be done; setup.sh does it otherwise
    local scratch=$folder/.build
    compgen -G "$whole/1-wheels/pycuda-*.whl" > /dev/null && return
    if [ ! -f "$python/include/python$version/Python.h" ] || ! command -v nvcc > /dev/null; then
        say "PyCUDA is left to setup.sh: no Python $version with headers, or no nvcc here"
        return
    fi
    say "PyCUDA, one to two minutes"
    "$python/bin/python$version" -m venv "$scratch"
    "$scratch/bin/pip" install --quiet --disable-pip-version-check setuptools wheel \
        "$(grep '^numpy==' "$here/wheels-$tag.txt" || echo numpy)"
    "$here/pycuda.sh" "$whole"/1-wheels/pycuda-*.tar.gz "$scratch/bin/python" "$whole/1-wheels"
    rm -rf "$scratch"
}

small_bundles() {
    local name
    [ -n "$offramp" ] || offramp=$repository/.venv/bin/python
    if [ ! -x "$offramp" ]; then
        say "no small bundles for tests/gpu/test_engines.py: give --offramp PYTHON"
        return
    fi
    say "small bundles"
    for name in residual bert; do
        rm -rf "$folder/.bundles/$name.ee"
        mkdir -p "$folder/.bundles"
        (
            cd "$repository"
            PYTHONPATH=src "$offramp" -c "
import pathlib, sys
from tests.engines import engine_bundle
engine_bundle(sys.argv[1], pathlib.Path(sys.argv[2]))" "$name" "$folder/.bundles/$name.ee"
        )
        bundles+=("$folder/.bundles/$name.ee")
    done
}

carry_bundles() {
    local bundle
    for bundle in "${bundles[@]}"; do
        [ -f "$bundle/manifest.json" ] || die "$bundle is no bundle: it has no manifest.json"
        say "bundle $(basename "$bundle")"
        mkdir -p "$whole/2-bundles"
        tar -C "$(dirname "$bundle")" --exclude='*/engines' --owner=0 --group=0 \
            -czf "$whole/2-bundles/$(basename "$bundle").tar.gz" "$(basename "$bundle")"
    done
}

carry_python() {
    [ -f "$whole/3-python.tar.gz" ] && return
    [ -n "$python" ] || die "TensorRT 8.6.0 needs Python 3.10, and none is here: give --python PREFIX"
    [ -f "$python/include/python3.10/Python.h" ] || die "$python has no headers, PyCUDA needs them"
    say "Python 3.10 of $python"
    local scratch=$folder/.python
    rm -rf "$scratch"
    mkdir -p "$scratch/python/bin" "$scratch/python/lib/others"
    cp "$python/bin/python3.10" "$scratch/python/bin/"
    cp -a "$python"/lib/libpython3*.so* "$scratch/python/lib/" 2> /dev/null || true
    cp -a "$python/include" "$scratch/python/"
    tar -C "$python" --exclude=__pycache__ --exclude=test --exclude=tests --exclude=site-packages \
        --exclude=idlelib --exclude=tkinter --exclude=ensurepip --exclude='*.a' --exclude=lib2to3 \
        -cf - lib/python3.10 | tar -C "$scratch/python" -xf -
    # What its modules load beside glibc, for a machine that lacks it.
    local module
    for module in ctypes bz2 lzma zlib ssl hashlib sqlite3 uuid; do
        ldd "$python"/lib/python3.10/lib-dynload/_"$module".*.so 2> /dev/null || true
        ldd "$python"/lib/python3.10/lib-dynload/"$module".*.so 2> /dev/null || true
    done | awk '$3 ~ /^\// { print $3 }' | sort -u \
        | grep -vE '/(libc|libm|libdl|libpthread|librt|libpython3[.0-9]*)\.so' \
        | while read -r library; do cp -L "$library" "$scratch/python/lib/others/"; done
    tar -C "$scratch" --owner=0 --group=0 -czf "$whole/3-python.tar.gz.part" python
    mv "$whole/3-python.tar.gz.part" "$whole/3-python.tar.gz"
    rm -rf "$scratch"
}

carry_provider() {
    compgen -G "$whole/5-provider/onnxruntime_gpu-$provider-*.whl" > /dev/null && return
    say "onnxruntime-gpu $provider: 250 MB"
    rm -rf "$whole/5-provider"
    mkdir -p "$whole/5-provider"
    fetch "$whole/5-provider" "onnxruntime-gpu==$provider"
}

carry_tensorrt() {
    [ -f "$whole/4-tensorrt.tar.zst" ] && return
    if [ -z "$wheel" ]; then
        say "TensorRT $tensorrt from the registry: 819 MB"
        fetch "$folder/.wheel" "tensorrt==$tensorrt"
        wheel=$(compgen -G "$folder/.wheel/tensorrt-$tensorrt-*.whl")
    fi
    [ -f "$wheel" ] || die "$wheel does not exist"
    say "packing TensorRT, some minutes"
    "$tool" "$here/pack.py" pack "$wheel" "$whole/4-tensorrt.tar.zst"
}

if [ -z "$python" ]; then
    python=$("python$version" -c 'import sys; print(sys.base_prefix)' 2> /dev/null || true)
elif [ ! -x "$python/bin/python$version" ]; then
    die "$python/bin/python$version does not exist"
fi
tools
wheels
build_pycuda
small_bundles
carry_bundles
if [ "$tensorrt" != none ]; then
    carry_python
    carry_tensorrt
fi
if [ -n "$provider" ]; then
    carry_provider
fi
say "parts"
python3 "$here/parts.py" split "$whole" "$folder" --megabytes "$megabytes"
cat <<DONE

Carry part-00, part-01, … of $folder to the GPU machine, into one folder; where a call carries only
so much, one after the other: setup.sh takes what is there, and says what is not.
There: tools/gpu/setup.sh FOLDER
DONE
