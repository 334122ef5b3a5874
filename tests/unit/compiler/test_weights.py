"""A model's weights are on the disk once, and what names them computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.sliced import Sliced, sliced

from offramp.calibration.scratch import ScratchError, ScratchSpace
from offramp.compiler import weights
from offramp.compiler.graph import weight_bytes
from offramp.compiler.runtime import GraphRunner, random_inputs
from offramp.compiler.weights import weight_file
from offramp.engine.assembly import assemble
from offramp.engine.backends.onnxruntime import make_session


@pytest.fixture(autouse=True)
def _store_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LEAST_BYTES", 64)


def held(graph: bytes) -> int:
    """Bytes of the weights that a graph holds itself."""
    proto = onnx.ModelProto.FromString(graph)
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


@pytest.mark.parametrize("name", ["residual", "bert", "mlp"])
def test_every_weight_is_kept_once_and_comes_back(name: str, tmp_path: Path) -> None:
    pieces: Sliced = sliced(name)
    source = pieces.model.proto.SerializeToString()
    scratch = ScratchSpace(tmp_path)
    with weight_file(pieces.model.proto, scratch) as file:
        stored = pieces.stored(file)
        assert held(source) > 10 * held(stored.model.proto.SerializeToString())
        assert all(held(graph) < 512 for graph in stored.graphs)
        (place,) = tmp_path.rglob("weights")
        assert place.stat().st_size == scratch.taken_bytes
        # Each weight begins at a page of its own, and none is there for the segments again.
        count = sum(len(t.raw_data) >= 64 for t in pieces.model.proto.graph.initializer)
        assert place.stat().st_size <= weight_bytes(pieces.model.proto) + 4096 * count
        assert stored.whole(stored.model.proto.SerializeToString()) == source
        assert [stored.whole(graph) for graph in stored.graphs] == list(pieces.graphs)
        assert stored.whole_model().proto == pieces.model.proto
    assert scratch.taken_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_sessions_find_the_weights_that_graphs_name(tmp_path: Path) -> None:
    pieces = sliced("residual")
    feeds = random_inputs(pieces.model.proto, 3)
    answer = pieces.model.answer.output
    wanted = GraphRunner(pieces.model.proto).run(feeds)[answer]
    joined = make_session(assemble(pieces.graphs, [answer]), 1).run([answer], feeds)[0]
    with weight_file(pieces.model.proto, ScratchSpace(tmp_path)) as file:
        stored = pieces.stored(file)
        np.testing.assert_array_equal(GraphRunner(stored.model.proto).run(feeds)[answer], wanted)
        graph = assemble(stored.graphs, [answer])
        np.testing.assert_array_equal(make_session(graph, 1).run([answer], feeds)[0], joined)
    with pytest.raises(RuntimeError):  # the file is gone, and names lead nowhere
        GraphRunner(stored.model.proto)


def test_weights_without_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 7})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    message = rf"the model's weights take .*, but {tmp_path} has .*\(7 bytes\) free; free the space"
    with (
        pytest.raises(ScratchError, match=message),
        weight_file(sliced("mlp").model.proto, ScratchSpace(tmp_path)),
    ):
        pass
