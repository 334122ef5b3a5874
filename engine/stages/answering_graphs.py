"""Graphs that answer a sample at every exit and at the model's end, for records and comparisons."""

from __future__ import annotations

from offramp.bundle.schema.parts import last_beginning
from offramp.engine.graphs.assembly import ReadPart, assemble
from offramp.engine.stages.plan import ModelStructure


def answering_graphs(structure: ModelStructure, read: ReadPart) -> tuple[bytes, ...]:
    """Join all segments and exits, used or not, to answer at every exit and at the model's end.

    Returns one graph, or two for a cascade: the graph with all exits, and the source model, which
    may have another opset.
    """
    outputs = [name for e in structure.exits for name in (e.output, e.confidence)]
    exits = [e.file for e in structure.exits]
    segments = [s.file for s in structure.segments]
    answer = structure.answer.output
    if begins := last_beginning(structure.segments):
        front = assemble([read(file) for file in (*segments[:begins], *exits)], outputs)
        return front, assemble([read(file) for file in segments[begins:]], [answer])
    return (assemble([read(file) for file in (*segments, *exits)], [*outputs, answer]),)
