"""No package imports another in a circle, the core knows no extension, heavy packages are rare.

The table in CONTRIBUTING.md and its drawing are those of the source.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from offramp.tools.layers import (
    CONTRIBUTING,
    DRAWING,
    SCRIPTS,
    Package,
    circles,
    draw,
    imports_of,
    is_within,
    read_modules,
    read_packages,
    top_folders,
    with_table,
)

ROOT = Path(__file__).parents[2]
CORE = (
    *("bundle", "certify", "proto", "client", "engine", "compiler", "calibration", "server"),
    *("api", "commands"),
)
EXTENSIONS = ("offramp.baselines", "offramp.cluster", "offramp.generation", "offramp.supernet")
MOST_FILES = 22
SERVING = ("certify", "bundle", "engine", "proto", "server", "client")
"""Run where nothing of the compiler is installed."""
COMPILING = {"onnx", "torch", "onnx_graphsurgeon", "onnxslim"}


@cache
def packages() -> dict[str, Package]:
    return read_packages()


@cache
def modules() -> dict[str, set[str]]:
    return read_modules()


def importers_of(*names: str) -> set[str]:
    return {
        module
        for module, found in modules().items()
        if any(is_within(name, *names) for name in found)
    }


def test_all_packages_are_looked_at() -> None:
    assert {name.partition(".")[0] for name in packages()} == set(top_folders())
    assert len(modules()) > 80
    policy = modules()["offramp.bundle.schema.policy"]
    assert any(is_within(name, "offramp.certify") for name in policy)


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
    """Extensions are the exception: they are found by a table of names."""
    scripts = [f"offramp.{script}" for script in SCRIPTS]
    named = {m for m in importers_of("?dynamic") if not is_within(m, *scripts)}
    assert named == {"offramp.engine.common.extensions"}


def test_no_package_imports_another_in_a_circle() -> None:
    assert circles(packages().values()) == []
    assert circles(
        [_package("a", "b"), _package("b", "c"), _package("c", "b", "d"), _package("d")]
    ) == [["b", "c"]]


def _package(name: str, *packages: str) -> Package:
    return Package(name=name, purpose="", imports=packages, third_party=())


def test_the_core_knows_no_extension() -> None:
    core = tuple(f"offramp.{package}" for package in CORE)
    assert {m for m in importers_of(*EXTENSIONS) if is_within(m, *core)} == set()


def test_no_folder_is_crowded() -> None:
    for folder in {path.parent for top in top_folders() for path in (ROOT / top).rglob("*.py")}:
        assert len([*folder.glob("*.py")]) <= MOST_FILES, folder


def test_each_package_says_what_it_is_for() -> None:
    assert {name for name, package in packages().items() if len(package.purpose) <= 20} == set()


def test_the_table_and_the_drawing_are_those_of_the_source() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert text == with_table(text, packages().values()), "run python -m offramp.tools.layers"
    assert DRAWING.read_text(encoding="utf-8") == draw(packages()), (
        "run python -m offramp.tools.layers"
    )


def test_few_modules_name_tensorrt() -> None:
    """Allowed are code shared by compiler and runtime, the builder, the backend, and GPU
    scripts.
    """
    allowed = ("offramp.engine.tensorrt", "offramp.engine.backends.tensorrt")
    allowed += ("offramp.compiler.engines.tensorrt_builder", "offramp.tools.gpu")
    allowed += ("offramp.engine.cuda.pycuda_driver", "offramp.engine.cuda.primary_context")
    named = importers_of("tensorrt", "pycuda")
    assert named
    assert {module for module in named if not is_within(module, *allowed)} == set()


def test_only_the_network_side_names_grpc() -> None:
    network = ("offramp.server", "offramp.client", "offramp.proto")
    network += ("offramp.tools.bench.load.transports",)
    named = importers_of("grpc", "grpc_health", "grpc_reflection", "grpc_tools")
    assert named
    assert all(is_within(module, *network) for module in named)


def test_only_training_names_torch() -> None:
    named = {m for m in importers_of("torch") if not is_within(m, "offramp.tools.zoo")}
    names = [f"calibration.heads.{name}" for name in ("head_training", "learners", "objectives")]
    torch_files = ("torch_graph", "bridge_training", "joint_training")
    names += [f"calibration.torch.{name}" for name in torch_files]
    elastic = ("elastic_layers", "space", "supernet", "sandwich_rule", "supernet_export")
    names += [f"supernet.training.{name}" for name in elastic]
    texts = ("adapters", "fitting", "joint_text", "judges", "small_heads")
    names += [f"generation.training.{name}" for name in texts]
    training = {f"offramp.{name}" for name in names}
    training |= {"offramp.api.compiling", "offramp.api.torch_export"}  # of the user's own modules
    operators = {m for m in modules() if is_within(m, "offramp.calibration.torch_operators")}
    package = {"offramp.calibration.torch_operators"}
    assert named == training | (operators - package)  # the zoo trains example models
    readers = importers_of("offramp.calibration.torch_operators") - operators
    assert readers == {"offramp.calibration.torch.torch_graph"}, "operators are for the graph alone"


def test_building_engines_and_measuring_gpus_needs_no_torch() -> None:
    """An engine is built where it is served, and torch is not needed there."""
    modules = "compiler.engines.build compiler.commands.cli compiler.commands.printing"
    modules += " compiler.engines.tensorrt_builder tools.gpu.benchmark calibration.data.errors"
    modules += " compiler.plain.wrap"
    code = "import sys; sys.modules['torch'] = None; import " + ", ".join(
        f"offramp.{module}" for module in modules.split()
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_serving_needs_nothing_of_the_compiler() -> None:
    serving = tuple(f"offramp.{package}" for package in SERVING)
    assert {m for m in importers_of(*COMPILING) if is_within(m, *serving)} == set()


def test_the_product_does_without_its_fakes() -> None:
    others = ("offramp.testing", "offramp.tools.gpu")
    assert {m for m in importers_of("offramp.testing") if not is_within(m, *others)} == set()


def test_names_of_heavy_packages_appear_nowhere_else_in_serving_code() -> None:
    """Type comments and evaluated strings are included."""
    for path in (path for top in SERVING for path in (ROOT / top).rglob("*.py")):
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert not names & (COMPILING | {"pycuda"}), path
