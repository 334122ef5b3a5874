"""Sizes of a model's parts: bytes of a sample that pass between segments, and weight bytes.

Plans of clusters need these sizes (E3 3.2). The compiler writes them into the manifest; for bundles
of older compilers, ``eecompile plan`` measures them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx
from numpy.typing import NDArray

from offramp.bundle import Segment
from offramp.bundle.schema.parts import PartSizes
from offramp.compiler.graphs.graph import weight_bytes
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.assembly import assemble
from offramp.engine.stages.plan import ModelStructure, carried_over


def sized_segments(
    structure: ModelStructure, read: Callable[[str], bytes], row: Mapping[str, NDArray[Any]]
) -> tuple[Segment, ...]:
    """Return the segments with their sizes, for a manifest; see :func:`measure_sizes`."""
    sizes = measure_sizes(structure, read, row)
    crossing = (*sizes.row_bytes, 0)
    return tuple(
        replace(segment, row_bytes=bytes_, weight_bytes=weights)
        for segment, bytes_, weights in zip(
            structure.segments, crossing, sizes.weight_bytes, strict=True
        )
    )


def measure_sizes(
    structure: ModelStructure, read: Callable[[str], bytes], row: Mapping[str, NDArray[Any]]
) -> PartSizes:
    """Measure the sizes of all parts.

    ``read`` returns a part's graph, whose weights may be in a file. ``row`` is one sample, with
    arrays by graph input, in the shapes of the calibration data.
    """
    return PartSizes(
        row_bytes=_crossing_bytes(structure, read, row),
        weight_bytes=_weight_bytes(structure, read),
    )


def _crossing_bytes(
    structure: ModelStructure, read: Callable[[str], bytes], row: Mapping[str, NDArray[Any]]
) -> tuple[int, ...]:
    """Return the bytes [segments - 1] of tensors and inputs that are needed after each segment.

    Sizes of cut tensors are measured by running the segments on one sample: shapes in a graph may
    be symbolic.
    """
    before = structure.segments[:-1]
    carried = [carried_over(structure, segment.index, segment.index + 1) for segment in before]
    sizes = {name: array.nbytes for name, array in row.items()}
    names = list(dict.fromkeys(name for each in carried for name in each if name not in row))
    if names:
        session = make_session(assemble([read(segment.file) for segment in before], names), 1)
        given = {tensor.name: row[tensor.name] for tensor in session.get_inputs()}
        found = session.run(names, given)
        sizes |= {name: array.nbytes for name, array in zip(names, found, strict=True)}
    return tuple(sum(sizes[name] for name in each) for each in carried)


def _weight_bytes(structure: ModelStructure, read: Callable[[str], bytes]) -> tuple[int, ...]:
    """Return the weight bytes [segments] of each segment's graph with the exit after it."""

    def of(file: str) -> int:
        return weight_bytes(onnx.load_model_from_string(read(file)))

    sizes = [of(segment.file) for segment in structure.segments]
    for exit_ in structure.exits:
        sizes[exit_.after_segment] += of(exit_.file)
    return tuple(sizes)
