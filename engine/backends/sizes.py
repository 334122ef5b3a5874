"""Shapes of a bundle's tensors, found by running the model on the CPU.

Shape inference loses sizes at a ``Reshape``, so graphs may lack them; one run finds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np

from offramp.bundle import Bundle
from offramp.bundle.engines import parts_digest
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.executable import Shape
from offramp.engine.graphs.assembly import assemble

PROBED_ROWS = 2
"""Number of rows in the run: small, but not 1, because a size of 1 broadcasts."""

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}
"""Numpy types by ONNX Runtime's names."""


class Argument(Protocol):
    """An input or output, as described by ONNX Runtime."""

    name: str
    type: str
    shape: Sequence[int | str | None]


def dtype_of(argument: Argument) -> np.dtype[Any]:
    """Return the numpy type of an input or output; BackendError if numpy has no such type."""
    found = _NUMPY.get(argument.type)
    if found is None:
        raise BackendError(f"{argument.name} is a {argument.type}; known are {', '.join(_NUMPY)}")
    return np.dtype(found)


class BundleSizes:
    """Shapes of one sample of inputs and cut tensors, as in the calibration data; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[str, dict[str, Shape]] = {}
        """Shapes by hash of the source model."""

    def of(self, bundle: Bundle) -> Mapping[str, Shape]:
        """Return the shapes of one row, without the batch, by tensor; the first call is slow."""
        manifest = bundle.manifest
        digest = parts_digest(manifest, 0, len(manifest.segments) - 1, None)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = _measured(bundle)
            return self._known[digest]


class GraphShapes:
    """Shapes of a graph's outputs for any shapes of its inputs; used by one thread at a time."""

    def __init__(self, model: bytes) -> None:
        """Load a serialised ONNX model; BackendError if ONNX Runtime cannot load it."""
        self._model = model
        session = _session(model)
        self.inputs: dict[str, Argument] = {a.name: a for a in session.get_inputs()}
        self.outputs: dict[str, Argument] = {a.name: a for a in session.get_outputs()}
        self._known: dict[tuple[Shape, ...], dict[str, Shape]] = {}
        """Shapes of one row of the outputs, by shapes of the inputs."""

    def of(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of all outputs; BackendError if the graph does not take such inputs.

        They are derived from the graph's symbolic sizes; where these are lost, by running it on
        zeros.
        """
        key = tuple(inputs[name][1:] for name in self.inputs)
        if key not in self._known:
            self._known[key] = self._by_names(inputs) or self._by_running(inputs)
        rows = next(iter(inputs[name][0] for name in self.inputs))
        return {name: (rows, *shape) for name, shape in self._known[key].items()}

    def _by_names(self, inputs: Mapping[str, Shape]) -> dict[str, Shape] | None:
        sizes: dict[int | str | None, int] = {}
        for name, argument in self.inputs.items():
            for size, given in zip(argument.shape[1:], inputs[name][1:], strict=False):
                if sizes.setdefault(size, given) != given:
                    return None
        found = {}
        for name, argument in self.outputs.items():
            shape = [s if isinstance(s, int) else sizes.get(s) for s in argument.shape[1:]]
            if None in shape or any(s is None for s in argument.shape[1:]):
                return None
            found[name] = tuple(int(s) for s in shape if s is not None)
        return found

    def _by_running(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        session = _session(self._model)
        zeros = {
            name: np.zeros((PROBED_ROWS, *inputs[name][1:]), dtype_of(argument))
            for name, argument in self.inputs.items()
        }
        return _run(session, zeros, list(self.outputs))


def _measured(bundle: Bundle) -> dict[str, Shape]:
    manifest = bundle.manifest
    shapes = manifest.calibration.sample_shapes
    cuts = [name for segment in manifest.segments for name in segment.outputs]
    parts = [bundle.read(segment.file) for segment in manifest.segments]
    zeros = {
        spec.name: np.zeros((PROBED_ROWS, *shapes[spec.name]), spec.dtype)
        for spec in manifest.inputs
    }
    session = _session(assemble(parts, cuts))
    read = {argument.name for argument in session.get_inputs()}
    found = _run(session, {n: a for n, a in zeros.items() if n in read}, cuts)
    return {**{name: tuple(shape) for name, shape in shapes.items()}, **found}


def _session(model: bytes) -> Any:
    try:
        return make_session(model, threads=1)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        raise BackendError(f"ONNX Runtime cannot load a graph: {error}") from error


def _run(session: Any, inputs: Mapping[str, Any], names: list[str]) -> dict[str, Shape]:
    try:
        outputs = session.run(names, dict(inputs))
    except Exception as error:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in inputs.items())
        raise BackendError(f"the model does not take {shapes}: {error}") from error
    return {n: tuple(o.shape[1:]) for n, o in zip(names, outputs, strict=True)}
