"""Each room imports what the table in CONTRIBUTING.md allows, and nothing else; the table is read.

Besides: heavy packages are named in the fewest modules that can hold them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offramp.tools.layers import CONTRIBUTING, DRAWING, draw, read_rooms

ROOT = Path(__file__).parents[2]
ROOMS = read_rooms(CONTRIBUTING.read_text(encoding="utf-8"))
TOP = sorted({name.partition(".")[0] for name in ROOMS})
SCRIPTS = ("offramp.tools.gpu", "offramp.tools.zoo", "offramp.tools.mutate")
"""Run on machines of their own, with packages of their own; they may import everything."""
SERVING = ("certify", "bundle", "engine", "proto", "server", "client")
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


FILES = {path: read(path) for package in TOP for path in (ROOT / package).rglob("*.py")}
MODULES = {module_name(path): imported for path, imported in FILES.items()}


def importers_of(*names: str) -> set[str]:
    return {
        module
        for module, found in MODULES.items()
        if any(is_within(name, *names) for name in found)
    }


def room_of(module: str) -> str:
    """The innermost room of the table that a module is in."""
    return max((room for room in ROOMS if is_within(module, f"offramp.{room}")), key=len)


def test_all_packages_are_looked_at() -> None:
    linked = {p.name for p in (ROOT / "src" / "offramp").iterdir() if p.is_symlink()}
    assert linked == set(TOP)
    assert len(MODULES) > 80
    assert any(is_within(name, "offramp.certify") for name in MODULES["offramp.bundle.policy"])


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
    assert {m for m in importers_of("?dynamic") if not is_within(m, *SCRIPTS)} == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_the_table_allows(room: str) -> None:
    allowed = {room, *ROOMS[room].rooms, "__version__"}
    packages = {*sys.stdlib_module_names, *ROOMS[room].packages}
    wrong = set()
    for module, imported in MODULES.items():
        if is_within(module, *SCRIPTS) or room_of(module) != room:
            continue
        for name in imported:
            if not is_within(name, "offramp"):
                fine = name.partition(".")[0] in packages
            elif name.count(".") == 1:  # ``from offramp import __version__``
                fine = name.removeprefix("offramp.") in allowed
            else:
                fine = room_of(name) in allowed
            if not fine:
                wrong.add(f"{module} imports {name}")
    assert wrong == set()


@pytest.mark.parametrize("room", ROOMS)
def test_the_table_allows_no_more_than_is_needed(room: str) -> None:
    mine = [m for m in MODULES if not is_within(m, *SCRIPTS) and room_of(m) == room]
    used = {name for module in mine for name in MODULES[module]}
    rooms = {room_of(n) for n in used if is_within(n, "offramp") and n.count(".") > 1} - {room}
    packages = {name.partition(".")[0] for name in used} - {*sys.stdlib_module_names, "offramp"}
    assert (rooms, packages) == (set(ROOMS[room].rooms), set(ROOMS[room].packages))


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_says_what_it_is_for_and_what_it_may_import(room: str) -> None:
    source = (ROOT / room.replace(".", "/") / "__init__.py").read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    imports = ", ".join(ROOMS[room].rooms) or "no other package of Offramp"
    assert len(docstring.partition("\n")[0]) > 20
    assert f"May import: {imports}." in " ".join(docstring.split())


def test_the_drawing_of_the_layers_is_that_of_the_table() -> None:
    assert DRAWING.read_text(encoding="utf-8") == draw(ROOMS), "run python -m offramp.tools.layers"


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
    names = ["training", "learners", "objectives", "torch_graph"]
    names += ["bridge_training", "joint_training", "joint_state"]
    names += [f"elastic.{name}" for name in ("layers", "space", "supernet", "training", "export")]
    training = {f"offramp.calibration.{name}" for name in names}
    training |= {"offramp.api.compiling", "offramp.api.torch_export"}  # of the user's own modules
    operators = {m for m in MODULES if is_within(m, "offramp.calibration.torch_operators")}
    tables = {"offramp.calibration.torch_operators", "offramp.calibration.torch_operators.table"}
    assert named == training | (operators - tables)  # the zoo trains example models
    readers = importers_of("offramp.calibration.torch_operators") - operators
    assert readers == {"offramp.calibration.torch_graph"}, "operators are for the graph alone"


def test_building_engines_and_measuring_gpus_needs_no_torch() -> None:
    """An engine is built where it is served, and torch is not needed there."""
    modules = "compiler.build compiler.commands.cli compiler.printing compiler.tensorrt"
    modules += " tools.gpu.benchmark calibration.errors compiler.plain.wrap"
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
    """Not in type comments or strings that are evaluated either."""
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in SERVING:
            names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
            assert not names & (COMPILING | {"pycuda"}), path
