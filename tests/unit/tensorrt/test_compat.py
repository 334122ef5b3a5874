"""Calls of TensorRT 8.6, 10 and 11, checked with fakes that have exactly their names."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.tensorrt.fake_tensorrt import SCRATCH_BYTES, FakeTensorRT

from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import compat


def config_of(fake: FakeTensorRT) -> Any:
    return fake.module.IBuilderConfig()


def engine_of(fake: FakeTensorRT) -> Any:
    graph = {"inputs": {"x": ["FLOAT", [-1, 2]]}, "outputs": {"y": ["FLOAT", [-1, 2]]}}
    return fake.module.ICudaEngine({"graph": graph, "profiles": [{}, {}]})


def test_version(fake: FakeTensorRT, version: str) -> None:
    assert (compat.version(), compat.major()) == {
        "8.6.0": ("8.6.0", 8),
        "10.16": ("10.16.0.72", 10),
        "11.4": ("11.4.0.106", 11),
    }[version]


def test_loading(fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    compat.load()
    fake.module.__version__ = "8.5.3.1"
    with pytest.raises(BackendError, match=facts("TensorRT 8.5.3.1", "8.6")):
        compat.load()


def test_what_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(BackendError, match=r"package pycuda\S* is not installed: "):
        compat.load()


def test_network_flags(fake: FakeTensorRT) -> None:
    """Explicit batch is bit 0 of 8.6, strong typing bit 1 of 10; 11 has no use for either."""
    assert compat.network_flags() == {8: 0b1, 10: 0b10, 11: 0}[fake.major]


@pytest.mark.parametrize(
    ("precision", "cleared", "old"),
    [
        ("fp32", [("TF32",)], []),
        ("tf32", [], []),
        ("fp16", [("TF32",)], [("FP16",)]),
        ("int8", [("TF32",)], [("INT8",)]),
    ],
)
def test_precision(fake: FakeTensorRT, precision: str, cleared: list[Any], old: list[Any]) -> None:
    compat.allow_precision(config_of(fake), precision)
    assert fake.called("clear_flag") == cleared
    assert fake.called("set_flag") == (old if fake.major == 8 else [])


HALF = "/half"
"""Suffix of the names of float16 tensors."""

LAYERS = [
    ["CONVOLUTION", ["x"], {"sum": "FLOAT"}],
    ["CAST", ["sum"], {"half": "HALF"}],
    ["CONSTANT", [], {"weight": "FLOAT"}],
    ["CONVOLUTION", ["half", None], {"conv": "FLOAT"}],  # its type is not inferred yet
    ["SHAPE", ["conv"], {"shape": "INT32"}],
    ["ACTIVATION", ["conv"], {"relu": "FLOAT"}],
    ["ACTIVATION", ["relu"], {"inferred": "HALF"}],
    ["CAST", ["inferred"], {"cut": "FLOAT"}],
    ["SHUFFLE", ["cut", "shape"], {"flat": "FLOAT"}],
    ["CONCATENATION", ["flat", "sum"], {"both": "FLOAT"}],
    ["UNARY", ["shape"], {"shape_as_float": "FLOAT"}],
    ["TOPK", ["both"], {"confidence": "FLOAT", "place": "INT32"}],
]
"""A segment in float16 between two casts, then an exit in float32."""


def network_of(fake: FakeTensorRT, layers: list[Any]) -> Any:
    network = fake.module.INetworkDefinition()
    network._graph["inputs"]["x"] = ["FLOAT", [-1, 3]]
    network._add_layers(layers)
    return network


def test_what_is_float32_in_an_fp16_graph_stays_so(fake: FakeTensorRT) -> None:
    """8.6 might compute it in float16 otherwise; later versions take types from the graph."""
    compat.keep_float32(config_of(fake), network_of(fake, LAYERS), "fp16", HALF)
    if fake.major >= 10:
        assert fake.calls == []
        return
    assert fake.called("set_flag") == [("OBEY_PRECISION_CONSTRAINTS",)]
    single = ["sum", "flat", "both", "confidence"]
    assert fake.called("set_output_type") == [(name, "FLOAT") for name in single]
    single.remove("both")  # a concatenation computes nothing
    assert fake.called("precision") == [(name, "FLOAT") for name in single]


def test_a_cast_by_another_layer_is_one_too(fake: FakeTensorRT) -> None:
    layers = [
        ["CAST", ["x"], {"half": "HALF"}],
        ["IDENTITY", ["half"], {"cut": "FLOAT"}],
        ["SOFTMAX", ["cut"], {"y": "FLOAT"}],
    ]
    network = network_of(fake, layers)
    network._layers[1]._set_types = {0}
    compat.keep_float32(config_of(fake), network, "fp16", HALF)
    assert fake.called("set_output_type") == ([("y", "FLOAT")] if fake.major == 8 else [])


@pytest.mark.parametrize("cast", ["IDENTITY", "CAST"])
def test_float16_is_found_though_casts_to_it_are_called_float32(
    fake: FakeTensorRT, cast: str
) -> None:
    """TensorRT 8.6 names them so on a GPU; then every layer stayed in float32, and fp16 gained
    nothing.
    """
    layers = [
        [cast, ["x"], {"x/half": "FLOAT"}],
        ["CONSTANT", [], {"weight": "FLOAT"}],
        ["SHUFFLE", ["x/half"], {"(unnamed 2)": "FLOAT"}],  # the parser adds such layers
        ["CONVOLUTION", ["(unnamed 2)", None], {"(unnamed 3)": "FLOAT"}],
        ["ACTIVATION", ["(unnamed 3)"], {"relu/half": "FLOAT"}],
        ["MATRIX_MULTIPLY", ["relu/half", "weight"], {"product/half": "FLOAT"}],
        [cast, ["product/half"], {"cut": "FLOAT"}],
        ["SOFTMAX", ["cut"], {"y": "FLOAT"}],
    ]
    network = network_of(fake, layers)
    for layer in (network._layers[0], network._layers[-2]):
        layer._set_types = {0}  # of an IDENTITY it is what makes it a cast
    compat.keep_float32(config_of(fake), network, "fp16", HALF)
    held = [("y", "FLOAT")] if fake.major == 8 else []
    assert fake.called("precision") == fake.called("set_output_type") == held


@pytest.mark.parametrize("precision", ["fp32", "tf32", "int8"])
def test_other_precisions_need_no_holding(fake: FakeTensorRT, precision: str) -> None:
    """Between Q/DQ pairs an int8 graph has float32 where kernels of int8 are wanted."""
    compat.keep_float32(config_of(fake), network_of(fake, LAYERS), precision, HALF)
    assert fake.calls == []


def test_kernels_of_other_libraries_are_off(fake: FakeTensorRT) -> None:
    """8.6: bits 3 and 4 are its own convolutions, 0 to 2 cuBLAS, cuBLASLt and cuDNN."""
    compat.use_own_kernels_only(config_of(fake))
    assert fake.called("set_tactic_sources") == ([(0b11000,)] if fake.major == 8 else [])


def test_progress(fake: FakeTensorRT) -> None:
    seen: list[Any] = []

    def stepped(phase: str, step: int) -> bool:
        seen.append((phase, step))
        return step < 1

    config = config_of(fake)
    kept = compat.watch_progress(
        config,
        started=lambda phase, steps: seen.append(("start", phase, steps)),
        stepped=stepped,
        finished=lambda phase: seen.append(("finish", phase)),
    )
    assert compat.has_progress() == (fake.major >= 10) == (kept is not None)
    if kept is None:
        assert config._set == {}
        return
    monitor = config.progress_monitor
    assert isinstance(monitor, fake.module.IProgressMonitor)
    monitor.phase_start("Build", None, 2)
    assert monitor.step_complete("Build", 0) is True
    assert monitor.step_complete("Build", 1) is False
    monitor.phase_finish("Build")
    assert seen == [("start", "Build", 2), ("Build", 0), ("Build", 1), ("finish", "Build")]


def test_what_the_parser_says(fake: FakeTensorRT) -> None:
    parser = fake.module.OnnxParser(fake.module.INetworkDefinition(), None)
    parser._errors = [
        [4, "conv1", "Conv", "bad weights"],
        [-1, "", "", "none"],
        [2, "", "", "x"],
    ]
    named = "bad weights (node 4, Conv conv1)"
    assert compat.parser_errors(parser, lambda number: f"operator of {number}") == [
        named if fake.major >= 10 else "bad weights (node 4, operator of 4)",
        "none",
        "x (node 2)" if fake.major >= 10 else "x (node 2, operator of 2)",
    ]


def test_contexts_without_memory(fake: FakeTensorRT) -> None:
    context = compat.context_without_memory(engine_of(fake))
    how = "without_device_memory" if fake.major == 8 else "USER_MANAGED"
    assert fake.called("create_execution_context") == [(how,)]
    context.set_optimization_profile_async(1, 7)
    compat.give_memory(context, 512, 4096)
    assert context._memory == ((512, None) if fake.major == 8 else (512, 4096))


def test_no_context(fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(fake)
    monkeypatch.setattr(type(engine).__mro__[1], "_context", lambda *_: None)
    with pytest.raises(BackendError, match="could not make an execution context"):
        compat.context_without_memory(engine)


def test_scratch_memory_of_a_profile(fake: FakeTensorRT) -> None:
    """8.6 only knows what the hungriest profile needs."""
    engine = engine_of(fake)
    sizes = [compat.scratch_bytes(engine, profile) for profile in (0, 1)]
    hungriest = max(SCRATCH_BYTES.values())
    assert sizes == ([hungriest] * 2 if fake.major == 8 else [SCRATCH_BYTES[0], SCRATCH_BYTES[1]])


def test_types(fake: FakeTensorRT) -> None:
    types = fake.module.DataType
    wanted = {"FLOAT": "f4", "HALF": "f2", "INT8": "i1", "INT32": "i4", "BOOL": "?", "UINT8": "u1"}
    wanted |= {"INT64": "i8", "BF16": "u2"} if fake.major >= 10 else {}
    assert {n: compat.numpy_dtype(types[n]) for n in wanted} == {
        name: np.dtype(code) for name, code in wanted.items()
    }
    with pytest.raises(BackendError, match="type FP8; known are FLOAT, HALF"):
        compat.numpy_dtype(types.FP8)


def test_integers_are_narrowed_if_they_fit(fake: FakeTensorRT) -> None:
    int32 = fake.module.DataType.INT32
    narrow = compat.to_tensor(np.array([[2**31 - 1, -(2**31)]]).T, int32)
    assert narrow.dtype == np.int32
    assert narrow.flags.c_contiguous
    assert narrow.tolist() == [[2**31 - 1], [-(2**31)]]
    assert compat.to_tensor(np.empty((0, 3), np.int64), int32).shape == (0, 3)
    with pytest.raises(BackendError, match=facts("0 to 2147483648", "int32")):
        compat.to_tensor(np.array([0, 2**31]), int32)


@pytest.mark.parametrize(("given", "name"), [("f4", "INT32"), ("i4", "BOOL"), ("f4", "UINT8")])
def test_other_kinds_are_refused(fake: FakeTensorRT, given: str, name: str) -> None:
    with pytest.raises(BackendError, match="cannot be a TensorRT input of"):
        compat.to_tensor(np.ones(2, given), fake.module.DataType[name])


@pytest.mark.parametrize("version", ["10.16", "11.4"], indirect=True)
def test_bfloat16(fake: FakeTensorRT) -> None:
    """Rounded to 8 bits of mantissa, ties to even, as the hardware does."""
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, np.inf, -np.inf, np.nan, 1e-40], "f4")
    bits = compat.to_tensor(values, fake.module.DataType.BF16)
    assert bits.dtype == np.uint16
    back = compat.from_tensor(bits, fake.module.DataType.BF16)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(
        back, np.array([1, 1, 1 + 2**-6, -2.5, np.inf, -np.inf, np.nan, back[7]], "f4")
    )
    assert abs(back[7] - 1e-40) < 2**-134  # half of the smallest subnormal
    untouched = np.ones(3, np.float16)
    assert compat.from_tensor(untouched, fake.module.DataType.HALF) is untouched
