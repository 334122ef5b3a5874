"""Who may import whom: design.md, "The house", held by looking at every import there is."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bundle", "calibration", "certify", "client", "compiler",
            "engine", "proto", "server", "testing", "tools")  # fmt: skip
PURE = ("offramp.bundle", "offramp.certify", "offramp.engine.scheduling", "offramp.engine.control",
        "offramp.engine.exit_check")  # fmt: skip
"""Only the standard library and numpy, and each other."""
SERVING = ("bundle", "engine", "proto", "server", "client")
"""Run where nothing of the compiler is installed."""
COMPILING = {"onnx", "torch", "onnx_graphsurgeon", "onnxslim"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["offramp", *(p for p in parts if p != "__init__")])


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Full names of all modules imported anywhere in a source, lazily and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            if node.level:
                base = base[: len(base) - node.level + is_package]
            prefix = [*base] if node.level else []
            name = ".".join([*prefix, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and node.args:
                argument = node.args[0]
                yield str(argument.value) if isinstance(argument, ast.Constant) else "?dynamic"


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def read(path: Path) -> set[str]:
    module = module_name(path)
    source = path.read_text()
    return set(imports_of(source, module, is_package=path.name == "__init__.py"))


FILES = {path: read(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
MODULES = {module_name(path): imported for path, imported in FILES.items()}


def importers_of(*names: str) -> set[str]:
    return {
        module
        for module, found in MODULES.items()
        if any(is_within(name, *names) for name in found)
    }


def test_all_packages_are_looked_at() -> None:
    linked = {p.name for p in (ROOT / "src" / "offramp").iterdir() if p.is_symlink()}
    assert linked == set(PACKAGES)
    assert len(MODULES) > 80
    assert "offramp.certify.decision" in MODULES["offramp.bundle.policy"] | {
        name.rpartition(".")[0] for name in MODULES["offramp.bundle.policy"]
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("def f():\n    from onnx import helper", {"onnx.helper"}),
        ("from . import base", {"offramp.a.base"}),
        ("from ..b import c", {"offramp.b.c"}),
        ("importlib.import_module('grpc')", {"grpc"}),
        ("importlib.import_module(name)", {"?dynamic"}),
    ],
)
def test_the_reader_sees_all_kinds_of_import(source: str, found: set[str]) -> None:
    assert set(imports_of(source, "offramp.a.m", is_package=False)) == found


def test_nothing_is_imported_under_a_computed_name() -> None:
    assert importers_of("?dynamic") == set()


@pytest.mark.parametrize("module", [m for m in sorted(MODULES) if is_within(m, *PURE)])
def test_bundle_and_policies_import_only_the_standard_library_and_numpy(module: str) -> None:
    allowed = {*sys.stdlib_module_names, "numpy"}
    foreign = {
        name
        for name in MODULES[module]
        if name.split(".")[0] not in allowed and not is_within(name, *PURE)
    }
    assert foreign == set()


def test_the_bundle_knows_nothing_of_those_who_use_it() -> None:
    bundle = [m for m in MODULES if is_within(m, "offramp.bundle")]
    others = {n for m in bundle for n in MODULES[m] if is_within(n, "offramp")}
    assert all(is_within(name, "offramp.bundle", "offramp.certify") for name in others)


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("compiler", ("server", "client", "proto")),
        ("server", ("compiler", "calibration", "client")),
        ("client", ("server", "compiler", "calibration", "engine", "bundle")),
        ("engine", ("server", "client", "proto", "compiler", "calibration")),
        ("calibration", ("server", "client", "proto", "compiler")),
        ("proto", ("server", "client", "engine", "compiler", "calibration")),
    ],
)
def test_data_flow_one_way(package: str, never: tuple[str, ...]) -> None:
    forbidden = tuple(f"offramp.{name}" for name in never)
    wrong = {m for m in importers_of(*forbidden) if is_within(m, f"offramp.{package}")}
    assert wrong == set()


def test_few_modules_name_tensorrt() -> None:
    """What compiler and runtime share, the builder, the backend, and scripts for a GPU machine."""
    allowed = ("offramp.engine.tensorrt", "offramp.engine.backends.tensorrt")
    allowed += ("offramp.compiler.tensorrt", "offramp.tools.gpu")
    allowed += ("offramp.engine.cuda.pycuda_driver",)
    named = importers_of("tensorrt", "pycuda")
    assert named
    assert {module for module in named if not is_within(module, *allowed)} == set()


def test_only_the_network_side_names_grpc() -> None:
    network = ("offramp.server", "offramp.client", "offramp.proto")
    network += ("offramp.tools.bench.load.worker",)
    named = importers_of("grpc", "grpc_health", "grpc_reflection", "grpc_tools")
    assert named
    assert all(is_within(module, *network) for module in named)


def test_only_training_names_torch() -> None:
    named = {m for m in importers_of("torch") if not is_within(m, "offramp.tools.zoo")}
    training = {"offramp.calibration.training", "offramp.calibration.learners"}
    assert named == training  # the zoo trains example models


def test_serving_needs_nothing_of_the_compiler() -> None:
    serving = tuple(f"offramp.{package}" for package in SERVING)
    assert {m for m in importers_of(*COMPILING) if is_within(m, *serving)} == set()


def test_names_of_heavy_packages_appear_nowhere_else_in_serving_code() -> None:
    """Not in type comments or strings that are evaluated either."""
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in SERVING:
            names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
            assert not names & (COMPILING | {"pycuda"}), path
