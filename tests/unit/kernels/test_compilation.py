"""The kernels compile for every GPU that we name, by nvcc and by NVRTC, and are kept well."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.facts import facts
from tests.unit.kernels.cubins import architecture, entry_points

from offramp.engine.kernels import compilers, kernel_compilation
from offramp.engine.kernels.compilers import (
    INSTALL,
    Compiled,
    KernelCompileError,
    KernelCompiler,
    KernelCompilerNotFoundError,
    Nvcc,
    Nvrtc,
    find_compilers,
)
from offramp.engine.kernels.kernel_arguments import ENTRY_POINTS
from offramp.engine.kernels.kernel_compilation import (
    FOLDER,
    architecture_of,
    compile_kernels,
    load_kernels,
    program,
    source_hash,
)

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SMALL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'


class FakeCompiler:
    """Returns the source text as its cubin."""

    architectures = ("sm_80", "sm_90")

    def __init__(self, error: str = "", *, cuda_major: int = 12) -> None:
        self.name = f"fake {cuda_major}.0"
        self.cuda_major = cuda_major
        self.error = error
        self.texts: list[str] = []

    def compile(self, text: str, architecture: str, folder: Path) -> Compiled:
        self.texts.append(text)
        if self.error:
            raise KernelCompileError(self.error)
        return Compiled(f"{architecture} {text}".encode(), "")


@cache
def real(make: Callable[[], KernelCompiler]) -> KernelCompiler | str:
    """A compiler of this machine, or why it is not there."""
    try:
        return make()
    except KernelCompilerNotFoundError as error:
        return str(error)


def use(monkeypatch: pytest.MonkeyPatch, *found: KernelCompiler) -> None:
    monkeypatch.setattr(kernel_compilation, "find_compilers", lambda: found)


# --- the real kernels, by the real compilers ------------------------------------------------


def test_a_compiler_is_here() -> None:
    """One of the two compilers must be present wherever tests run: the extra dev includes NVRTC."""
    assert find_compilers(), INSTALL


@pytest.mark.parametrize("make", [Nvcc, Nvrtc], ids=["nvcc", "NVRTC"])
@pytest.mark.parametrize(
    "target",
    [ARCHITECTURES[0], *(pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES[1:])],
)
def test_the_kernels_compile(make: Callable[[], KernelCompiler], target: str) -> None:
    compiler = real(make)
    if isinstance(compiler, str):
        pytest.skip(compiler)  # the test above fails if the other is missing too
    cubin, log = compiler.compile(program(), target, FOLDER)
    assert architecture(cubin) == target
    assert entry_points(cubin) == set(ENTRY_POINTS)
    assert "warning" not in log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= len(ENTRY_POINTS)
    assert set(spills) == {("0", "0")}


@pytest.mark.parametrize("make", [Nvcc, Nvrtc], ids=["nvcc", "NVRTC"])
def test_what_the_compiler_says_is_in_the_error(
    make: Callable[[], KernelCompiler], tmp_path: Path
) -> None:
    compiler = real(make)
    if isinstance(compiler, str):
        pytest.skip(compiler)
    (tmp_path / "wrong.cu").write_text(SMALL.replace("float*", "flaot*"))
    with pytest.raises(KernelCompileError, match=r"flaot"):
        compile_kernels("sm_90", [compiler], folder=tmp_path)


# --- which compiler -------------------------------------------------------------------------


def test_all_sources_go_into_one_cubin(tmp_path: Path) -> None:
    for name in ("b.cu", "a.cu", "part.cuh"):
        (tmp_path / name).touch()
    compiler = FakeCompiler()
    assert compile_kernels("sm_90", [compiler], folder=tmp_path)[1].startswith(b"sm_90")
    assert compiler.texts == ['#include "a.cu"\n#include "b.cu"\n']


def test_a_compiler_that_fails_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = FakeCompiler("no C++ compiler"), FakeCompiler()
    assert compile_kernels("sm_90", compilers=[broken, whole]) == compile_kernels(
        "sm_90", compilers=[whole]
    )
    assert "no C++ compiler" in caplog.text


def test_when_all_fail_the_error_has_what_each_said() -> None:
    with pytest.raises(KernelCompileError, match=facts("sm_90", "of memory", "too tired", "pip")):
        compile_kernels(
            "sm_90", compilers=[FakeCompiler("out of memory"), FakeCompiler("too tired")]
        )


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    compiler = FakeCompiler()
    with pytest.raises(KernelCompileError, match=r"sm_130.*\n.*fake 12.0 .*sm_80, sm_90 only"):
        compile_kernels("sm_130", [compiler])
    assert compiler.texts == []


def test_no_compiler_says_where_was_looked_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilers, "_TOOLKIT", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(KernelCompilerNotFoundError, match=r"no nvcc.*cuda-bindings.*pip install"):
        find_compilers()


def test_cuda_bindings_without_its_library_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        @staticmethod
        def nvrtcVersion() -> None:  # noqa: N802
            raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", Bindings)
    with pytest.raises(KernelCompilerNotFoundError, match=r"libnvrtc cannot be used.*Failure"):
        Nvrtc()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_found_where_the_toolkit_is_told_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 14.2, V14.2.1"\n'
        '[ "$1" = --list-gpu-code ] && printf "sm_90\\nsm_140\\n"\nexit 0\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    found = Nvcc()
    assert found.name == f"nvcc 14.2 ({nvcc})"
    assert found.cuda_major == 14
    assert found.architectures == ("sm_90", "sm_140")
    with pytest.raises(KernelCompileError, match=r"ended with 0 for sm_90"):  # and wrote nothing
        found.compile("", "sm_90", tmp_path)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo hello", "--version names no release of CUDA"),  # which drivers run what it makes?
        ("echo broken >&2\nexit 3", "ended with 3: broken"),
    ],
)
def test_an_nvcc_that_tells_no_release_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, told: str
) -> None:
    (tmp_path / "nvcc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(KernelCompilerNotFoundError, match=told):
        Nvcc()


# --- the cache ------------------------------------------------------------------------------


def test_the_compute_capability_names_the_architecture() -> None:
    assert [architecture_of(c) for c in ((7, 5), (9, 0), (12, 1))] == ["sm_75", "sm_90", "sm_121"]


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = FakeCompiler()
    use(monkeypatch, compiler)
    first = load_kernels((9, 0), tmp_path)
    assert load_kernels((9, 0), tmp_path) == first
    assert len(compiler.texts) == 1
    assert load_kernels((8, 0), tmp_path).startswith(b"sm_80")
    assert len(compiler.texts) == 2
    assert len(list(tmp_path.iterdir())) == 2  # and nothing half written


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-1] + b"?"])
def test_a_damaged_file_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    use(monkeypatch, FakeCompiler())
    first = load_kernels((9, 0), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert load_kernels((9, 0), tmp_path) == first
    assert path.read_bytes()[32:] == first


class OtherCompiler(FakeCompiler):
    """One whose cubins can be told apart."""

    def compile(self, text: str, architecture: str, folder: Path) -> Compiled:
        cubin, log = super().compile(text, architecture, folder)
        return Compiled(self.name.encode() + cubin, log)


def test_what_a_newer_cuda_compiled_is_not_given_to_an_older_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The newer is found first, and its cubin was kept when the driver was newer too."""
    new, old = OtherCompiler(cuda_major=13), OtherCompiler(cuda_major=12)
    use(monkeypatch, new, old)
    assert load_kernels((9, 0), tmp_path).startswith(b"fake 13.0")
    assert load_kernels((9, 0), tmp_path, driver_version=(13, 1)).startswith(b"fake 13.0")
    for _ in range(2):
        assert load_kernels((9, 0), tmp_path, driver_version=(12, 8)).startswith(b"fake 12.0")
    assert (len(new.texts), len(old.texts)) == (1, 1)
    assert load_kernels((9, 0), tmp_path).startswith(b"fake 13.0")


def test_only_compilers_that_are_too_new() -> None:
    new = FakeCompiler(cuda_major=13)
    said = r"(?s)fake 13.0 is too new for the driver, which is of CUDA 12.4.*CUDA 12: 'cuda-bind"
    with pytest.raises(KernelCompileError, match=said):
        compile_kernels("sm_90", [new], driver_version=(12, 4))
    assert new.texts == []
    assert compile_kernels("sm_90", [new], driver_version=(13, 0))[1].startswith(b"sm_90")


def test_another_compiler_version_recompiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = OtherCompiler(), OtherCompiler()
    other.name = "fake 12.1"
    use(monkeypatch, one)
    load_kernels((9, 0), tmp_path)
    use(monkeypatch, other)
    assert load_kernels((9, 0), tmp_path).startswith(b"fake 12.1")
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_kept_does_for_a_machine_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> tuple[KernelCompiler, ...]:
        raise KernelCompilerNotFoundError("no compiler")

    use(monkeypatch, OtherCompiler(cuda_major=13))
    kept = load_kernels((9, 0), tmp_path)
    monkeypatch.setattr(kernel_compilation, "find_compilers", none)
    assert load_kernels((9, 0), tmp_path) == kept
    assert load_kernels((9, 0), tmp_path, driver_version=(13, 0)) == kept
    for capability, driver in (((9, 0), (12, 9)), ((8, 0), (13, 0))):
        with pytest.raises(KernelCompilerNotFoundError, match="no compiler"):
            load_kernels(capability, tmp_path, driver_version=driver)


def test_changed_sources_are_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = FakeCompiler()
    use(monkeypatch, compiler)
    load_kernels((9, 0), tmp_path)
    monkeypatch.setattr(kernel_compilation, "source_hash", lambda: "f" * 64)
    load_kernels((9, 0), tmp_path)
    assert len(compiler.texts) == 2


def test_the_hash_is_of_all_sources_their_names_and_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.cu").write_text("one")
    (tmp_path / "b.cuh").write_text("two")
    seen = [source_hash(tmp_path)]
    (tmp_path / "notes.py").write_text("not a kernel")
    assert source_hash(tmp_path) == seen[0]
    (tmp_path / "b.cuh").write_text("three")
    seen.append(source_hash(tmp_path))
    (tmp_path / "b.cuh").rename(tmp_path / "c.cuh")
    seen.append(source_hash(tmp_path))
    monkeypatch.setattr(kernel_compilation, "OPTIONS", ("-O0",))
    seen.append(source_hash(tmp_path))
    assert len(set(seen)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in seen)


def test_an_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = FakeCompiler()
    use(monkeypatch, compiler)
    (tmp_path / "file").touch()  # a folder cannot be made of it, not even by root
    first = load_kernels((9, 0), tmp_path / "file")
    assert load_kernels((9, 0), tmp_path / "file") == first
    assert len(compiler.texts) == 2


def test_a_full_disk_leaves_no_partial_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    use(monkeypatch, FakeCompiler())
    monkeypatch.setattr(Path, "replace", refuse)
    assert load_kernels((9, 0), tmp_path).startswith(b"sm_90")
    assert list(tmp_path.iterdir()) == []


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, FakeCompiler())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_kernels((9, 0))
    assert len(list((tmp_path / "xdg" / "offramp" / "kernels").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_kernels((9, 0))
    assert len(list((tmp_path / "home" / ".cache" / "offramp" / "kernels").iterdir())) == 1


def test_two_processes_at_once_get_the_same_kernels(tmp_path: Path) -> None:
    """Processes and compilers are real: the last rename has written the same content."""
    program = (
        "import hashlib, sys; from pathlib import Path\n"
        "from offramp.engine.kernels.kernel_compilation import load_kernels\n"
        "print(hashlib.sha256(load_kernels((9, 0), Path(sys.argv[1]))).hexdigest())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert content[:32] == hashlib.sha256(content[32:]).digest()
    assert entry_points(content[32:]) == set(ENTRY_POINTS)
    assert hashlib.sha256(content[32:]).hexdigest() in said
