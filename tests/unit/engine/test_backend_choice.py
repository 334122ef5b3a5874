"""Choice of the backend, and its messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from tests.engines import engine_bundle
from tests.facts import Told, facts, tells
from tests.unit.bundle.cascades import write_cascade
from tests.unit.cuda.fake_pycuda import ENTRY_POINTS_OF_CUBIN, Gpu, installed

from offramp.bundle.engines import EngineEntry, EngineStore, EngineTarget, list_targets
from offramp.engine.backends import factory, make_backend, onnxruntime_cuda
from offramp.engine.backends.several_devices import SeveralDevices
from offramp.engine.common.errors import BackendError
from offramp.engine.kernels.kernel_compilation import source_hash
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.tensorrt import probe

H200 = probe.Device(
    index=1, name="NVIDIA H200", compute_capability=(9, 0), driver_version=(13, 0), total_bytes=1
)
TARGET = EngineTarget(
    gpu="NVIDIA H200", compute_capability=(9, 0), tensorrt="10.16.0.72", precision="fp32"
)


class Named:
    """A backend that only has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        """Hold nothing."""


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libcuda-that-is-not-there.so.1")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU and all packages; gives what backends are made with."""
    seen: dict[str, Any] = {}

    def on_gpu(device: probe.Device, options: Any, of: Any) -> Backend:
        seen.update(device=device, options=options)
        name = "tensorrt" if "TensorRTFactory" in of.__code__.co_freevars else "onnxruntime-cuda"
        return Named(name)  # type: ignore[return-value]

    monkeypatch.setattr(probe, "find_device", lambda index: H200)
    monkeypatch.setattr(probe, "missing_packages", list)
    monkeypatch.setattr(factory, "_tensorrt_version", lambda: TARGET.tensorrt)
    monkeypatch.setattr("offramp.engine.cuda.pycuda_driver.require_pycuda", lambda: None)
    monkeypatch.setattr(onnxruntime_cuda, "try_provider", lambda device: None)
    monkeypatch.setattr("offramp.engine.tensorrt.compat.load", lambda: None)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(factory, "_on_gpu", on_gpu)
    return seen


def with_engines(path: Path, **changes: Any) -> Path:
    engine_bundle("residual", path)
    store = EngineStore.open(path, TARGET)
    entry = EngineEntry.of("00-03", b"plan", key={}, profiles=(), build_s=1.0)
    store.put(entry, b"plan")
    return path


def choice(caplog: pytest.LogCaptureFixture, name: str = "auto", **options: Any) -> tuple[str, str]:
    caplog.clear()
    caplog.set_level(logging.INFO, factory.__name__)
    backend = make_backend(name, **options)
    (line,) = [r.getMessage() for r in caplog.records if r.name == factory.__name__]
    return backend.name, line


def test_without_a_gpu_it_is_the_cpu_and_why(
    no_driver: None, caplog: pytest.LogCaptureFixture
) -> None:
    name, line = choice(caplog)
    assert name == "onnxruntime-cpu"
    tells(line, "backend: onnxruntime-cpu", "run on the CPU", "no NVIDIA driver")
    assert "expected" not in line  # nothing is wrong


def test_the_cpu_may_be_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert choice(caplog, "onnxruntime") == (
        "onnxruntime-cpu", "backend: onnxruntime-cpu (asked for by name)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensorrt", ("TensorRT", "cuda:2", "NVIDIA driver", "libcuda", "expected a machine")),
        ("cuda", ("CUDA", "cuda:2", "NVIDIA driver", "libcuda", "expected a machine")),
        ("tensorflow", ("'tensorflow'", "auto, tensorrt, cuda, openvino, onnxruntime")),
    ],
)
def test_what_is_asked_for_and_cannot_run_is_one_line(
    no_driver: None, name: str, told: Told
) -> None:
    with pytest.raises(BackendError) as caught:
        make_backend(name, devices=[2])
    tells(str(caught.value), *told)
    assert "\n" not in str(caught.value)


def test_tensorrt_comes_first_where_the_bundle_has_engines(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = with_engines(tmp_path / "a.ee")
    assert choice(caplog, bundles=[path], devices=[1], graphs=False, max_rows=7) == (
        "tensorrt", "backend: tensorrt (the fastest, and nothing is missing)",
    )  # fmt: skip
    assert made["device"] is H200
    assert (made["options"].graphs, made["options"].max_rows) == (False, 7)


def test_a_bundle_without_engines_is_served_by_cuda_and_told_how_to_build(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first, second = with_engines(tmp_path / "a.ee"), tmp_path / "b.ee"
    engine_bundle("residual", second)
    name, line = choice(caplog, bundles=[first, second], devices=[1])
    assert name == "onnxruntime-cuda"
    tells(
        line, "onnxruntime-cuda", "H200", "10.16.0.72", f"eecompile build {second} --device cuda:1"
    )


def test_a_bundle_of_int8_is_served_on_the_cpu(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = write_cascade(tmp_path).path
    name, line = choice(caplog, bundles=[path])
    assert name == "onnxruntime-cpu"
    assert line.count(f"{path} is of precision int8, which is for CPUs") == 2
    assert not made
    # who opens a bundle says what is wrong with it
    (path / "manifest.json").write_text("{}")
    assert choice(caplog, bundles=[path])[0] == "onnxruntime-cuda"


@pytest.mark.parametrize(
    ("change", "asked"), [({"tensorrt": "11.4.0.106"}, {}), ({}, {"precision": "fp16"})]
)
def test_engines_of_another_version_or_precision_do_not_count(
    made: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: dict[str, str],
    asked: dict[str, Any],
) -> None:
    monkeypatch.setattr(
        factory, "_tensorrt_version", lambda: change.get("tensorrt", TARGET.tensorrt)
    )
    path = with_engines(tmp_path / "a.ee")
    name, line = choice(caplog, bundles=[path], **asked)
    assert name == "onnxruntime-cuda"
    tells(line, "no engines", "NVIDIA H200", "TensorRT")


def test_without_either_package_both_reasons_are_told(
    made: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "missing_packages", lambda: ["tensorrt"])
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    name, line = choice(caplog)
    assert name == "onnxruntime-cpu"
    tells(line, f"tensorrt: {probe.INSTALL}", "CUDA")
    assert "has no CUDAExecutionProvider" in line


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("pycuda_driver.require_pycuda", "pycuda is installed but does not load: libcurand"),
        ("try_provider", "ONNX Runtime cannot use cuda:1: its CUDA provider does not load"),
    ],
)
def test_what_cuda_lacks_is_found_before_it_is_chosen(
    made: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    told: str,
) -> None:
    def refuse(*_: object) -> None:
        raise BackendError(told)

    module = "offramp.engine." + ("cuda." if "pycuda" in missing else "backends.onnxruntime_cuda.")
    monkeypatch.setattr(module + missing, refuse)
    monkeypatch.setattr(probe, "missing_packages", lambda: ["tensorrt"])
    name, line = choice(caplog)
    assert name == "onnxruntime-cpu"
    assert f"CUDA cannot be used on cuda:0: {told}" in line


# Kernels.


def test_kernels_of_the_engines_are_taken_if_they_are_of_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "load_kernels", lambda capability, **_: b"compiled")
    path = with_engines(tmp_path / "a.ee")
    store = EngineStore.open(path, TARGET)
    store.put_kernels(b"of older sources", source="0" * 64)
    assert factory.kernels_for(H200, [path]) == b"compiled"
    store.put_kernels(b"kept", source=source_hash())
    assert factory.kernels_for(H200, [path]) == b"kept"
    assert factory.kernels_for(replace(H200, compute_capability=(8, 0)), [path]) == b"compiled"


def test_engines_of_other_gpus_or_damaged_kernels_do_not_hide_the_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(factory, "load_kernels", lambda capability, **_: b"compiled")
    path = tmp_path / "a.ee"
    engine_bundle("residual", path)
    targets = [
        replace(TARGET, gpu="NVIDIA A10", compute_capability=(8, 6)),
        replace(TARGET, precision="fp16"),
        TARGET,
    ]
    for number, target in enumerate(targets):
        store = EngineStore.open(path, target)
        store.put(EngineEntry.of("00-03", b"plan", key={}, profiles=(), build_s=1.0), b"plan")
        store.put_kernels(b"kernels %d" % number, source=source_hash())
    assert list_targets(path) == tuple(targets)
    (damaged,) = (f for f in path.rglob("*") if f.is_file() and f.read_bytes() == b"kernels 1")
    damaged.write_bytes(b"KERNELS 1")
    assert factory.kernels_for(H200, [path]) == b"kernels 2"
    assert damaged.name in caplog.text


def test_kernels_are_compiled_for_what_the_driver_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        factory, "load_kernels", lambda *given, **how: seen.append((given, how)) or b"compiled"
    )
    assert factory.kernels_for(H200, []) == b"compiled"
    assert seen == [(((9, 0),), {"driver_version": (13, 0)})]


class Tracked:
    """A factory of stages that is only opened and closed."""

    name = "tracked"

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with installed(monkeypatch) as gpu:
        yield gpu


def on_gpu(path: Path, made: Tracked) -> Backend:
    options = factory._Options(
        threads=1, streams=1, devices=(0,), precision=None, graphs=True, max_rows=1, bundles=[path]
    )
    return factory._on_gpu(replace(H200, index=0), options, lambda _: made)  # type: ignore[arg-type, return-value]


def test_kernels_that_the_driver_does_not_load_are_compiled_here(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_engines(tmp_path / "a.ee")
    EngineStore.open(path, TARGET).put_kernels(b"of a newer CUDA", source=source_hash())
    monkeypatch.setattr(factory, "load_kernels", lambda *_, **__: ENTRY_POINTS_OF_CUBIN)
    made = Tracked()
    backend = on_gpu(path, made)
    assert made.closed == 0
    tells(caplog.text, "does not load our kernels")
    backend.close()
    assert made.closed == 1


def test_kernels_that_cannot_be_compiled_either_leave_nothing_open(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_engines(tmp_path / "a.ee")
    EngineStore.open(path, TARGET).put_kernels(b"of a newer CUDA", source=source_hash())

    def no_compiler(*_: object, **__: object) -> bytes:
        raise BackendError("no compiler: pip install one")

    monkeypatch.setattr(factory, "load_kernels", no_compiler)
    made = Tracked()
    with pytest.raises(BackendError, match="no compiler: pip install one"):
        on_gpu(path, made)
    assert made.closed == 1
    monkeypatch.setattr(factory, "load_kernels", lambda *_, **__: b"of a newer CUDA")
    with pytest.raises(BackendError, match="CUDA failed: cuModuleLoadDataEx failed"):
        on_gpu(path, made)
    assert made.closed == 2


# Several GPUs.


def test_on_several_gpus_each_has_a_backend_of_its_own(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = with_engines(tmp_path / "a.ee")
    name, line = choice(caplog, bundles=[path], devices=[0, 2])
    assert (name, line) == ("tensorrt", "backend: tensorrt (the fastest, and nothing is missing)")
    backend = make_backend("cuda", devices=[0, 2])
    assert isinstance(backend, SeveralDevices)
    assert (backend.name, backend.devices) == ("onnxruntime-cuda", ("cuda:0", "cuda:2"))


@pytest.mark.parametrize("name", ["auto", "tensorrt", "cuda"])
def test_a_missing_gpu_is_an_error_without_fallback_to_cpu(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def find_device(index: int) -> probe.Device:
        if index == 9:
            raise BackendError("there is no GPU cuda:9, cuda:0 to cuda:1, look at nvidia-smi")
        return H200

    monkeypatch.setattr(probe, "find_device", find_device)
    with pytest.raises(BackendError, match=facts("cuda:9", "cuda:0 to cuda:1")):
        make_backend(name, devices=[0, 9])


def test_where_no_backend_runs_on_several_gpus_the_reasons_are_told(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(device: int) -> None:
        raise BackendError("no provider")

    monkeypatch.setattr(onnxruntime_cuda, "try_provider", refuse)
    path = tmp_path / "a.ee"
    engine_bundle("residual", path)
    with pytest.raises(BackendError, match=facts("a.ee", "NVIDIA H200", "CUDA")):
        make_backend("auto", devices=[0, 1], bundles=[path])


def test_gpus_of_several_models_are_refused(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NVIDIA H200", "NVIDIA L4")
    monkeypatch.setattr(
        probe, "find_device", lambda index: replace(H200, index=index, name=names[index])
    )
    told = facts("cuda:0 is NVIDIA H200", "cuda:1 is NVIDIA L4", "one model", "--cluster")
    with pytest.raises(BackendError, match=told):
        make_backend("cuda", devices=[0, 1])


def test_without_gpus_to_use_auto_is_on_the_cpu(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert choice(caplog, devices=[]) == (
        "onnxruntime-cpu", "backend: onnxruntime-cpu (no GPU is to be used)",
    )  # fmt: skip
    with pytest.raises(BackendError, match=facts("none is named", "cuda:0")):
        make_backend("tensorrt", devices=[])


# Options.


def test_a_device_is_named_as_cuda_does() -> None:
    assert EngineOptions(device="cuda:3").device == "cuda:3"
    with pytest.raises(ValueError, match=facts("'gpu0'", "TensorRT", "cuda:0")):
        EngineOptions(device="gpu0")


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cpu,cuda:0", ("'cpu,cuda:0'", "'cpu'", "TensorRT", "cuda:0")),
        ("cuda:0,", ("'cuda:0,'", "''", "TensorRT")),
        ("cuda,cuda:0", ("'cuda,cuda:0'", "cuda:0 twice", "once")),
    ],
)
def test_devices_that_are_none_or_the_same_are_refused(device: str, told: Told) -> None:
    with pytest.raises(ValueError, match=facts(*told)):
        EngineOptions(device=device)


def test_each_device_has_a_stream_at_least() -> None:
    three = "cuda:0,cuda:1,cuda:2"
    assert EngineOptions(device=three).streams == 3
    assert EngineOptions(device=three, streams=5).streams == 5
    assert EngineOptions(device="cuda:2").streams == 1
    with pytest.raises(ValueError, match=facts("streams is 2", "3 GPUs")):
        EngineOptions(device=three, streams=2)
    with pytest.raises(ValueError, match=facts("backend onnxruntime", "CPU", "leave device")):
        EngineOptions(device=three, backend="onnxruntime")


def test_choosing_imports_nothing_of_a_gpu(no_driver: None) -> None:
    make_backend("auto")
    assert not {"tensorrt", "pycuda", "pycuda.driver"} & sys.modules.keys()
