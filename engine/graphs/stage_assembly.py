"""The graph of a stage: segments and an exit in one, in a cascade with its borders' form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from offramp.bundle import Exit, Segment
from offramp.engine.graphs.assembly import assemble
from offramp.engine.graphs.quantised_borders import carries_steps, give_steps, take_steps

ReadPart: TypeAlias = Callable[[str], bytes]
"""Gives the graph of a part by its file: whole, or naming its weights."""


def assemble_stage(
    around: Sequence[Segment],
    exit_: Exit | None,
    given: Sequence[str],
    inner: slice,
    read: ReadPart,
) -> bytes:
    """Join the inner ones of some segments with an exit, and carry integers where it can be done.

    ``around`` are, in a cascade, the neighbours too that a cut tensor comes from or goes to.
    """
    files = [read(segment.file) for segment in around]
    parts, outputs = files[inner], list(given)
    if exit_ is not None:
        parts.append(read(exit_.file))
        outputs = [exit_.output, exit_.confidence, *outputs]
    graph = assemble(parts, outputs)
    first, end = inner.start, inner.stop
    if first and carries_steps(files[first - 1], files[first], tensor := around[first - 1].output):
        graph = take_steps(graph, tensor)
    if end < len(files) and carries_steps(files[end - 1], files[end], around[end - 1].output):
        graph = give_steps(graph, around[end - 1].output)
    return graph
