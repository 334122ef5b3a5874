"""Inputs for a bundle's model: drawn at random, at the ends of their ranges, and broken ones.

A bundle has no samples, only what calibration saw of them: shapes, and mostly the least and the
greatest element. Where that is not there, the graph says how long the tables are that integers
index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, TensorSpec
from offramp.engine.graphs.onnx_subset import ModelProto

Inputs: TypeAlias = dict[str, NDArray[Any]]
"""By name: [rows, …], all of as many rows."""


_HANDING_ON = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten"})


class _Ends(NamedTuple):
    low: float
    high: float


class InputMaker:
    """Makes inputs that a bundle's model takes; the same ones every time."""

    def __init__(self, bundle: Bundle, *, seed: int = 0) -> None:
        self._inputs = bundle.manifest.inputs
        self._shapes = bundle.manifest.calibration.sample_shapes
        self._ends = {tensor.name: _ends(bundle, tensor) for tensor in self._inputs}
        self._seed = seed

    def drawn(self, rows: int) -> Inputs:
        """Draw samples, uniform between the ends of each input."""
        rng = np.random.default_rng(self._seed)
        return {
            tensor.name: self._fitted(tensor, rng.random((rows, *self._shapes[tensor.name])))
            for tensor in self._inputs
        }

    def at_the_ends(self) -> Inputs:
        """Make three samples: all elements the least, all the greatest, and both in turns."""
        made = {}
        for tensor in self._inputs:
            shape = self._shapes[tensor.name]
            turns = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 2
            shares = np.stack([np.zeros(shape), np.ones(shape), turns])
            made[tensor.name] = self._fitted(tensor, shares)
        return made

    def broken(self, rows: int) -> Inputs | None:
        """Draw samples whose first elements are NaN, or infinite in every second sample.

        ``None`` if no input takes such elements.
        """
        made, floating = self.drawn(rows), False
        for tensor in self._inputs:
            array = made[tensor.name]
            if array.dtype.kind == "f" and array[0].size:
                floating = True
                array.reshape(rows, -1)[0::2, 0] = np.nan
                array.reshape(rows, -1)[1::2, 0] = np.inf
        return made if floating else None

    def _fitted(self, tensor: TensorSpec, shares: NDArray[np.float64]) -> NDArray[Any]:
        """Turn shares of the way from one end to the other into elements of an input."""
        low, high = self._ends[tensor.name]
        dtype = np.dtype(tensor.dtype)
        if dtype.kind == "f":
            return (low + shares * (high - low)).astype(dtype)
        elements = np.minimum(np.floor(low + shares * (high - low + 1)), high).astype(dtype)
        if (low, high) == (0, 1) and elements[0].size > 1:
            elements.reshape(len(elements), -1)[:, 0] = 1  # a mask must not hide a sample wholly
        return elements


def take(inputs: Inputs, rows: NDArray[np.intp] | slice) -> Inputs:
    """Give some rows of inputs, as arrays of their own."""
    return {name: np.ascontiguousarray(array[rows]) for name, array in inputs.items()}


def join(*parts: Inputs) -> Inputs:
    """Put inputs one behind the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _ends(bundle: Bundle, tensor: TensorSpec) -> _Ends:
    ranges = bundle.input_ranges()
    for seen in ranges.inputs if ranges else ():
        if seen.name == tensor.name:
            return _Ends(seen.lowest, seen.highest)
    dtype = np.dtype(tensor.dtype)
    if dtype.kind == "f":
        return _Ends(-3.0, 3.0)
    lengths = list(_table_lengths(bundle, tensor.name))
    if lengths:
        return _Ends(0, min(lengths) - 1)
    return _Ends(0, 255) if dtype == np.uint8 else _Ends(0, 1)


def _table_lengths(bundle: Bundle, name: str) -> Iterator[int]:
    """Lengths of the tables that an input indexes, wherever in the model that is."""
    manifest, names = bundle.manifest, {name}
    parts = [(part.inputs, part.file) for part in manifest.segments]
    parts += [(part.inputs, part.file) for part in manifest.exits]
    for inputs, file in parts:
        if not names.isdisjoint(inputs):
            graph = ModelProto.FromString(bundle.read(file)).graph
            yield from _lengths_in(graph, names)


def _lengths_in(graph: Any, names: set[str]) -> Iterator[int]:
    """Those of a part; what only hands the indices on is added to their names."""
    tables = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    for node in graph.node:  # in the order of execution
        if node.op_type in _HANDING_ON and node.input[0] in names:
            names.add(node.output[0])
        elif node.op_type == "Gather" and node.input[1] in names and node.input[0] in tables:
            yield int(tables[node.input[0]])
