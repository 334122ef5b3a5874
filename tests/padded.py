"""Models over masked tokens with exits of random weights, made without training, and bundles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import (
    ActiveExit,
    Bundle,
    ExitPolicy,
    Head,
    InputRanges,
    LengthRange,
    Padding,
    write_bundle,
)
from offramp.bundle.files import dump
from offramp.bundle.schema.inputs import INPUT_RANGES
from offramp.bundle.schema.parts import HeadScore
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.exits import BuiltExit, build_on, reads_of
from offramp.compiler.samples.padding import find_paddings
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.tools.gpu.staged import plain_bundle

Arrays = dict[str, NDArray[Any]]

HEADS = (Head(kind="first"), Head(kind="mean"), Head(kind="attention", queries=2))


def draft_of(pieces: Sliced, heads: Sequence[Head] = HEADS) -> Draft:
    """An exit after each of the first segments, one of each head."""
    exits = [_built(pieces, candidate, head) for candidate, head in enumerate(heads)]
    return Draft.of(pieces, exits)


def _built(pieces: Sliced, candidate: int, head: Head) -> BuiltExit:
    cut, rng = pieces.cuts[candidate], np.random.default_rng(candidate)
    queries, classes = head.queries, pieces.model.answer.classes
    shapes = {"weight": (cut.width * (queries or 1), classes), "bias": (classes,)}
    if queries:
        shapes["queries"] = (queries, cut.width)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    score = HeadScore(head=head, agreement=0.5, cost_ms=0.1, net_savings=0.1)
    return BuiltExit(
        candidate=candidate,
        cut=cut,
        graph=build_on(pieces, candidate, head, weights),
        reads=reads_of(cut, head),
        weights=weights,
        heads=(score,),
        best=score,
    )


@functools.cache
def _everything(path: Path) -> ort.InferenceSession:
    bundle = Bundle.open(path)
    (graph,) = answering_graphs(bundle.manifest, bundle.read)
    return make_session(graph, 1)


def answers(bundle: Bundle, inputs: Arrays) -> Arrays:
    """Return answers and confidences of source model and exits for samples, by output."""
    session = _everything(bundle.path)
    names = [output.name for output in session.get_outputs()]
    read = {tensor.name for tensor in session.get_inputs()}
    values = session.run(names, {n: array for n, array in inputs.items() if n in read})
    return dict(zip(names, values, strict=True))


def sentences(samples: int, tokens: int, *, seed: int = 0, shortest: int = 2) -> Arrays:
    """Sentences of ``shortest`` words and more, padded to the same length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, tokens + 1, samples)
    lengths[:2] = tokens, shortest
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(1, 50, (samples, tokens)) * mask, "attention_mask": mask}


def paddings_of(
    pieces: Sliced, data: Arrays, heads: Sequence[Head] = HEADS, **options: Any
) -> tuple[Padding, ...]:
    draft, ranges = draft_of(pieces, heads), InputRanges.of(data)
    return find_paddings(pieces.model, draft, draft.read, data, ranges, **options)


def padded_bundle(
    pieces: Sliced,
    folder: Path,
    data: Arrays,
    *,
    threshold: float = 0.6,
    lengths: Sequence[LengthRange] = (),
) -> Bundle:
    """A bundle with all exits of :func:`draft_of` in use, and the paddings that are found."""
    draft = draft_of(pieces)
    after = [exit_.after_segment for exit_ in draft.exits]
    active = [ActiveExit(exit=e.index, threshold=threshold) for e in draft.exits]
    plain = plain_bundle(pieces, folder / "plain.ee", data, exits_after=after, active=active)
    content = {entry.path: plain.stored(entry.path) for entry in plain.manifest.files}
    content.pop("policy.json", None)
    ranges = replace(InputRanges.of(data), lengths=tuple(lengths))
    return write_bundle(
        folder / "padded.ee",
        replace(plain.manifest, exits=draft.exits, paddings=paddings_of(pieces, data)),
        ExitPolicy(version=1, active=tuple(active), promise=plain.policy.promise),
        {**content, **draft.files, INPUT_RANGES: dump(ranges)},
    )
