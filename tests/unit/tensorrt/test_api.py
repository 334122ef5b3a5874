"""Every name of TensorRT and PyCUDA that our code touches exists: on 8.6, 10.16 and 11.4.

No GPU and none of the two libraries is needed. What differs between TensorRT's versions may be
named in :mod:`offramp.engine.tensorrt.compat` only.
"""

from __future__ import annotations

import ast
import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.unit.tensorrt.bindings import (
    TENSORRT_VERSIONS,
    Bindings,
    pycuda,
    signatures_of,
    tensorrt,
)
from tests.unit.tensorrt.checking import check
from tests.unit.tensorrt.read_api import signature_of
from tests.unit.tensorrt.sources import LIBRARIES, names_bindings, own_names, return_types

ROOT = Path(__file__).parents[3]
FOLDERS = ("bundle", "calibration", "certify", "client", "compiler", "engine", "proto", "server",
           "testing", "tools", "tests/gpu", "benchmarks")  # fmt: skip
COMPAT = ROOT / "engine" / "tensorrt" / "compat.py"
"""The one module whose branches may depend on TensorRT's version."""

PATHS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def uses_bindings(path: Path) -> bool:
    """Every process of the tests asks this of every file: most need not be parsed for it."""
    words = (*LIBRARIES, "trt")
    return any(word in path.read_text() for word in words) and names_bindings(tree_of(path))


USERS = [path for path in PATHS if uses_bindings(path)]
VERSIONS = [tensorrt(version) for version in TENSORRT_VERSIONS]


@cache
def own() -> frozenset[str]:
    return own_names(map(tree_of, PATHS))


@cache
def returns() -> dict[str, ast.expr]:
    return return_types(map(tree_of, PATHS))


def name_of(path: object) -> str:
    return path.relative_to(ROOT).as_posix() if isinstance(path, Path) else str(path)


def findings(tree: ast.Module, version: Bindings, *, by_version: bool) -> list[str]:
    found = check(tree, [version, pycuda()], own=own(), returns=returns(), by_version=by_version)
    return [f"line {finding.line}: {finding.text}" for finding in found]


def complaints(source: str, version: str = "10.16", *, by_version: bool = False) -> str:
    """Return the checker's findings for a few lines, which import both libraries."""
    imports = "import tensorrt as trt\nimport pycuda.driver as cuda\n"
    tree = ast.parse(imports + source)
    return "\n".join(findings(tree, tensorrt(version), by_version=by_version))


def test_the_modules_that_use_the_bindings_are_looked_at() -> None:
    assert COMPAT in USERS
    assert ROOT / "compiler" / "engines" / "tensorrt_builder.py" in USERS
    assert len(PATHS) > 200


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("path", USERS, ids=name_of)
def test_every_name_exists(path: Path, version: Bindings) -> None:
    assert findings(tree_of(path), version, by_version=path == COMPAT) == []


def test_branches_that_no_tested_version_takes_name_what_some_version_has() -> None:
    """10.0 is between the versions: what only it takes is at least no misspelling."""
    by_version = [
        {f.replace(str(v), "") for f in findings(tree_of(COMPAT), v, by_version=False)}
        for v in VERSIONS
    ]
    assert set.intersection(*by_version) == set()
    assert set.union(*by_version) != set()  # or there would be no need for the module


def misspelled(path: Path) -> tuple[set[str], set[str]]:
    """Misspells the names of the libraries in a module, one after the other.

    Returns:
        Those that the checker then complains of, and those that it lets pass.
    """
    tree, by_version = ast.parse(path.read_text()), path == COMPAT
    before = [findings(tree, version, by_version=by_version) for version in VERSIONS]
    seen, passed = set(), set()
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]:
        right = node.attr
        if any(b.has_member(right) or right in b.names for b in [*VERSIONS, pycuda()]):
            node.attr = f"mis_{right}"
            after = [findings(tree, version, by_version=by_version) for version in VERSIONS]
            node.attr = right
            (seen if after != before else passed).add(right)
    return seen, passed - seen


def test_no_misspelling_in_our_code_would_pass() -> None:
    seen, passed = map(set.union, *(misspelled(path) for path in USERS))
    assert seen >= {
        "Builder", "create_network", "parse", "add_optimization_profile", "set_shape",
        "set_memory_pool_limit", "max_aux_streams", "build_serialized_network",
        "deserialize_cuda_engine", "set_input_shape", "set_tensor_address", "execute_async_v3",
        "mem_alloc", "memcpy_htod_async", "retain_primary_context", "push", "pop",
    }  # fmt: skip
    # The same words in Python and numpy, and what only a TensorRT between the tested ones takes.
    ordinary = set(dir(np)) | set(dir(np.ndarray)) | set(dir(logging)) | own()
    assert passed - seen - ordinary <= {"get_device_memory_size_for_profile"}


BAD = {
    "no such class": ("trt.Bulider(None)", "has no Bulider"),
    "no such function": ("cuda.mem_aloc(4)", "has no mem_aloc"),
    "no such enum member": ("trt.BuilderFlag.FP17", "BuilderFlag has no FP17"),
    "misspelled method": (
        'def f(context: "trt.IExecutionContext") -> None:\n    context.execute_asinc_v3(0)',
        "IExecutionContext has no execute_asinc_v3",
    ),
    "of another class": (
        "def f(builder: trt.Builder) -> None:\n    builder.set_flag(trt.BuilderFlag.TF32)",
        "Builder has no set_flag",
    ),
    "on what a method returns": (
        'def f(b: "trt.Builder | None") -> None:\n    b.create_builder_config().set_flagg(1)',
        "IBuilderConfig has no set_flagg",
    ),
    "through an attribute": (
        """
class A:
    def __init__(self) -> None:
        self._stream = cuda.Stream()
    def f(self) -> None:
        self._stream.synchronise()
""",
        "Stream has no synchronise",
    ),
    "through our own function": (
        'def made() -> "trt.ICudaEngine":\n    pass\nmade().num_io_tensor',
        "ICudaEngine has no num_io_tensor",
    ),
    "under an unknown name": ("def f(x):\n    x.get_tensor_shappe('a')", "get_tensor_shappe"),
    "in a comprehension": ("[trt.DataType.FLOATING for _ in range(3)]", "has no FLOATING"),
    "in an annotation": ('def f(b: "trt.IBuilder") -> None: pass', "no IBuilder to annotate"),
    "by getattr": ("getattr(trt.BuilderFlag, 'TF31')", "has no TF31"),
    "by getattr with a default": ("getattr(trt.BuilderFlag, 'TF31', None)", "in no version"),
    "too few arguments": (
        "def f(parser: trt.OnnxParser) -> None:\n    parser.parse()",
        "lacks model",
    ),
    "too many arguments": (
        "def f(c: trt.IExecutionContext) -> None:\n    c.infer_shapes(1)",
        "takes 0 arguments, not 1",
    ),
    "unknown keyword": (
        """
def f(p: trt.IOptimizationProfile) -> None:
    p.set_shape('x', min=(1,), best=(2,), max=(3,))
""",
        "takes no best",
    ),
    "constructor": ("trt.OnnxParser(None)", "lacks logger"),
    "function of pycuda": ("cuda.memcpy_htod_async(1, 2, 3, 4)", "takes 3 arguments, not 4"),
    "the wrong enum": (
        "def f(c: trt.IBuilderConfig) -> None:\n    c.set_flag(trt.TacticSource.CUBLAS)",
        "takes a BuilderFlag as flag, not a TacticSource",
    ),
    "set what is read only": (
        "def f(e: trt.ICudaEngine) -> None:\n    e.num_io_tensors = 3",
        "is read only",
    ),
    "set what is not there": (
        "def f(c: trt.IBuilderConfig) -> None:\n    c.max_aux_stream = 0",
        "has no max_aux_stream",
    ),
    "a callback that takes too little": (
        "class M(trt.IProgressMonitor):\n    def phase_start(self, name, steps): pass",
        "phase_start is given {3} arguments, not 2",
    ),
}


@pytest.mark.parametrize(("source", "said"), BAD.values(), ids=BAD.keys())
def test_wrong_code_is_found(source: str, said: str) -> None:
    assert said in complaints(source)
    assert complaints(source).count("\n") == 0  # and nothing else with it


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH", {"11.4"}),
        ("trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED", {"8.6.0"}),
        ("trt.BuilderFlag.FP16", {"11.4"}),
        ("trt.IProgressMonitor", {"8.6.0"}),
        ("def f(e: trt.ICudaEngine) -> None:\n    e.get_binding_index('x')", {"10.16", "11.4"}),
        ("def f(e: trt.ICudaEngine) -> None:\n    e.device_memory_size", {"11.4"}),
        ("def f(e: trt.ParserError) -> None:\n    e.node_name()", {"8.6.0"}),
        ("trt.int64", {"8.6.0"}),
    ],
)
def test_what_a_version_lacks_is_found_for_that_version(source: str, lacking: set[str]) -> None:
    assert {version for version in TENSORRT_VERSIONS if complaints(source, version)} == lacking


FINE = {
    "a build": """
def f(logger: "trt.ILogger", graph: bytes) -> bytes:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(graph):
        raise ValueError(parser.get_error(0).desc())
    config = builder.create_builder_config()
    config.max_aux_streams = 0
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
    profile = builder.create_optimization_profile()
    profile.set_shape(network.get_input(0).name, min=(1,), opt=(2,), max=(3,))
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))
""",
    "PyCUDA": """
class Runs:
    def __init__(self, cubin: bytes) -> None:
        self._context = cuda.Device(0).retain_primary_context()
        self._context.push()
        self._kernel = cuda.module_from_buffer(cubin).get_function("k")
        self._stream, self._event = cuda.Stream(), cuda.Event(cuda.event_flags.DISABLE_TIMING)
    def run(self, size: int) -> float:
        memory = cuda.mem_alloc(size)
        self._kernel(memory, block=(32, 1, 1), grid=(1, 1), stream=self._stream)
        self._event.record(self._stream).synchronize()
        memory.free()
        cuda.Context.pop()
""",
    "ordinary Python": "def f(x, text: str) -> None:\n    x.append(text.strip().encode())",
}


@pytest.mark.parametrize("version", TENSORRT_VERSIONS)
@pytest.mark.parametrize("source", FINE.values(), ids=FINE.keys())
def test_right_code_is_left_alone(source: str, version: str) -> None:
    assert complaints(source, version) == ""


GUARDED = """
def major() -> int:
    return int(trt.__version__.split(".")[0])
def is_old() -> bool:
    return major() < 10
def flags(config: "trt.IBuilderConfig") -> int:
    if hasattr(config, "progress_monitor"):
        config.progress_monitor = None
    if is_old():
        return int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    kept = trt.BuilderFlag.FP16 if major() == 10 else trt.BuilderFlag.TF32
    return int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
"""


@pytest.mark.parametrize("version", TENSORRT_VERSIONS)
def test_branches_for_other_versions_are_left_out_where_that_is_allowed(version: str) -> None:
    assert complaints(GUARDED, version, by_version=True) == ""
    if version != "10.16":  # which has the old names and the new
        assert complaints(GUARDED, version) != ""


def test_a_wrong_guard_is_found() -> None:
    source = GUARDED.replace("major() < 10", "major() < 11")
    assert "no EXPLICIT_BATCH" not in complaints(source, "10.16", by_version=True)
    source = GUARDED.replace("major() < 10", "major() > 10")
    assert "no EXPLICIT_BATCH" in complaints(source, "11.4", by_version=True)
    assert "no STRONGLY_TYPED" in complaints(source, "8.6.0", by_version=True)


def test_signatures_are_read_with_their_overloads_defaults_and_types() -> None:
    overloads = signatures_of(VERSIONS[1].classes["ICudaEngine"]["create_execution_context"])
    assert [p.name for p in overloads[0].parameters] == ["strategy"]
    (execute,) = signatures_of(tensorrt("8.6.0").classes["IExecutionContext"]["execute"])
    assert [(p.name, p.optional) for p in execute.parameters] == [
        ("batch_size", True),
        ("bindings", False),
    ]
    (error,) = signatures_of(tensorrt("8.6.0").classes["OnnxParser"]["get_error"])
    assert error.returns == "ParserError"


@pytest.mark.parametrize(
    ("documented", "read"),
    [
        (
            "f(self: tensorrt.tensorrt.A, x: int = 0) -> tensorrt.tensorrt.B\n\nDoes it.",
            "f(self: A, x: int = 0) -> B",
        ),
        (
            "Overloaded function.\n\n1. f(self: A) -> int\n\n2. f(self: A, x: str) -> int",
            "f(self: A) -> int || f(self: A, x: str) -> int",
        ),
        (
            "\nf( (Stream)arg1, (object)data [, (int)flags=0]) -> None :\n\n    C++ signature :",
            "f(self: Stream, data: object, flags: int = 0) -> None",
        ),
        ("f([  (object)stream]) -> Event :", "f(self: object = ...) -> Event"),
    ],
)
def test_signatures_are_read_off_docstrings_of_pybind11_and_boost(
    documented: str, read: str
) -> None:
    def f() -> None: ...

    f.__doc__ = documented
    assert signature_of("f", f, static=False) == read
