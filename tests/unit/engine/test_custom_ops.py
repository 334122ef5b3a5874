"""Libraries of operators: which a bundle needs, and that every session has those given."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import facts, tells
from tests.operators import DOMAIN, build_library, squash_mlp
from tests.unit.bundle.examples import MANIFEST, POLICY, write

from offramp.bundle import Bundle, Manifest
from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.engine.backends import make_backend
from offramp.engine.backends.custom_ops import (
    libraries,
    open_runnable,
    require_libraries,
    using_libraries,
)
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.common.errors import BackendError

ROOT = Path(__file__).parents[3]
NEEDED = OperatorLibrary(file="squash.so", sha256="0" * 64, operators=(f"{DOMAIN}:Squash",))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("operators"))


def needing(*needed: OperatorLibrary) -> Manifest:
    return replace(MANIFEST, custom_ops=needed)


def test_every_session_is_made_in_one_place() -> None:
    """ONNX Runtime's CUDA provider and tools outside the product create their own."""
    made = re.compile(r"\bort\.(SessionOptions|InferenceSession)\(")
    rooms = ("bundle", "calibration", "certify", "compiler", "engine", "server", "tools/bench")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if made.search(path.read_text())}
    assert found == {
        "engine/backends/custom_ops.py",
        "engine/backends/onnxruntime_cuda.py",
    }


def test_a_library_that_lacks_is_told_with_its_hash_and_the_flag() -> None:
    missing = ("squash.so", "sha256 000000000000", f"{DOMAIN}:Squash")
    with pytest.raises(BackendError, match=facts("a.ee", *missing, "--custom-ops LIB.so", "code")):
        require_libraries(needing(NEEDED), Path("a.ee"))


def test_the_library_is_known_by_its_content_whatever_its_name(library, tmp_path, caplog) -> None:
    moved = tmp_path / "renamed.so"
    moved.write_bytes(library.read_bytes())
    with using_libraries([moved]), caplog.at_level(logging.WARNING):
        (given,) = libraries()
        require_libraries(needing(replace(NEEDED, sha256=given.sha256)), Path("a.ee"))
    assert caplog.messages == []


def test_another_build_of_it_is_taken_with_a_warning(library, tmp_path, caplog) -> None:
    with using_libraries([library]), caplog.at_level(logging.WARNING):
        require_libraries(needing(NEEDED), Path("a.ee"))
    (told,) = caplog.messages
    tells(told, "a.ee", "another library", "squash.so (sha256")
    assert "squash.so (sha256 000000000000…" in told


def test_one_library_does_not_stand_for_two(library) -> None:
    with using_libraries([library]):
        (given,) = libraries()
        same = replace(NEEDED, sha256=given.sha256)
        other = replace(NEEDED, file="other.so", sha256="1" * 64)
        with pytest.raises(BackendError, match=r"not given: other\.so"):
            require_libraries(needing(same, other), Path("a.ee"))


def test_a_graph_names_its_missing_operator_library(library) -> None:
    model = squash_mlp().SerializeToString()
    with pytest.raises(BackendError, match=facts("Squash", DOMAIN, "load the lib")):
        make_session(model, 1)
    with using_libraries([library]):
        assert [tensor.name for tensor in make_session(model, 1).get_outputs()] == ["logits"]
    with pytest.raises(BackendError, match="--custom-ops"):
        make_session(model, 1)


def test_bundles_are_opened_to_be_run_with_their_libraries_alone(library, tmp_path) -> None:
    path = write(tmp_path, manifest=needing(NEEDED)).path
    assert Bundle.open(path).manifest.custom_ops == (NEEDED,)
    with pytest.raises(BackendError, match=r"squash\.so"):
        open_runnable(path)
    with using_libraries([library]):
        assert open_runnable(path).policy == POLICY


def test_backends_that_take_no_libraries_refuse_such_bundles(library, tmp_path) -> None:
    path = write(tmp_path, manifest=needing(NEEDED)).path
    with pytest.raises(BackendError, match=r"not given: squash\.so"):
        make_backend("openvino", bundles=[path])
    with using_libraries([library]):
        for name in ("openvino", "cuda", "tensorrt"):
            with pytest.raises(BackendError) as caught:
                make_backend(name, bundles=[path])
            told = str(caught.value)
            tells(told, f"backend {name}", "not support custom operators", "model")
            assert "squash.so (sha256 000000000000…" in told
            assert told.endswith("--backend onnxruntime")
        for name in ("onnxruntime", "auto"):
            backend = make_backend(name, bundles=[path])
            assert backend.name == "onnxruntime-cpu"
            backend.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"file": "/lib/evil.so"}, "without folders"),
        ({"file": ""}, "without folders"),
        ({"sha256": "abc"}, "64 hexadecimal digits"),
        ({"operators": ()}, "operators is empty"),
    ],
)
def test_a_bundle_names_libraries_by_name_and_hash_alone(change, told) -> None:
    with pytest.raises(ValueError, match=told):
        replace(NEEDED, **change)
