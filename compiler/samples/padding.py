"""Find by running the model whether samples of different lengths may share a padded batch.

A mask marks the positions that count, but not every model respects the mask: a model may average
over all positions, answer by the last position, or compute with neighbouring positions. So samples
of many lengths are run alone and padded together, through the source model and every exit. Values
where the mask is 0 must not matter: the usual fill value, and values of other samples, are tried at
these positions. Samples are padded while serving only if nothing but rounding differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import InputRanges, LengthRange, Padding, TensorSpec
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.common.rounding import SINGLE, STEPS, rounding_of
from offramp.compiler.cuts.slicing import find_masks
from offramp.compiler.graphs.row_mixing import scaled_by_batch
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.differences import Scales, relative_difference
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.plan import ModelStructure

_log = logging.getLogger(__name__)

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

_SAMPLES = 16
"""Number of samples that are run alone and padded, each with a different length if possible."""
_FAR_SAMPLES = 4
"""Number of those samples that are padded far beyond the lengths in the data."""
_FAR = 4
"""Factor by which these samples are padded beyond the lengths in the data."""
_COUNTED = 1024
"""Number of samples whose lengths are counted at a time; all data may not fit in memory."""
_PROBED = 1100
"""Length to try beyond the data. Position tables of up to 1,024 entries fail at it. Longer data is
not extended."""


def find_paddings(
    model: SourceModel,
    structure: ModelStructure,
    read: Callable[[str], bytes],
    samples: Arrays,
    ranges: InputRanges,
    *,
    mask: str | None = None,
    threads: int = 1,
) -> tuple[Padding, ...]:
    """Find the symbolic sizes in which samples may be padded; for other sizes, log the reason.

    ``structure`` describes the model's parts with every exit that was built; ``read`` returns the
    content of their files. ``samples`` are arrays by input, ``ranges`` the ranges of all data;
    ``mask`` is the input that the user named as the mask.
    """
    sizes, masks = symbolic_sizes(model.inputs), find_masks(model.inputs, (), mask)
    by_batch, found = bool(scaled_by_batch(model.proto)), list[Padding]()
    graphs: tuple[_Graph, ...] = ()
    if not by_batch and not masks.keys().isdisjoint(sizes):
        wanted = [name for e in structure.exits for name in (e.output, e.confidence)]
        wanted.append(structure.answer.output)
        graphs = tuple(_load(g, wanted, threads) for g in answering_graphs(structure, read))
    for size in sizes:
        outcome: Padding | str = f"no input [batch, {size}] is its mask (--mask names one)"
        if by_batch:
            outcome = "the model rounds each sample by the range of its whole batch"
        elif any(size in output.shape for output in model.outputs):
            outcome = "the answer has that size, too"
        elif size in masks:
            fills = _fills(model.inputs, size, masks[size], ranges)
            tried = Padding(
                size=size, mask=masks[size].name, fills=fills, longest=1, difference=0.0
            )
            outcome = _Trial.of(model, graphs, samples, (*found, tried)).outcome()
        if isinstance(outcome, Padding):
            found.append(outcome)
        else:
            told = "Samples of different `%s` are not padded into one batch: %s."
            _log.info(told, size, outcome)
    return tuple(found)


def symbolic_sizes(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the symbolic sizes of a sample, in the order in which the inputs have them."""
    sizes = [size for spec in inputs for size in spec.shape[1:] if isinstance(size, str)]
    return tuple(dict.fromkeys(sizes))


def length_ranges(
    inputs: Sequence[TensorSpec], paddings: Sequence[Padding], parts: Sequence[Dataset]
) -> tuple[LengthRange, ...]:
    """Return the range of lengths in the data; a mask gives the length if samples may be padded."""
    masks = {padding.size: padding.mask for padding in paddings}
    found = []
    for size in symbolic_sizes(inputs):
        mask = masks.get(size, "")
        lengths = np.concatenate([_lengths(inputs, size, mask, part) for part in parts])
        shortest, longest = int(lengths.min()), int(lengths.max())
        found.append(LengthRange(size=size, mask=mask, shortest=shortest, longest=longest))
    return tuple(found)


def _lengths(
    inputs: Sequence[TensorSpec], size: str, mask: str, part: Dataset
) -> NDArray[np.int64]:
    if mask:
        rows = (slice(start, start + _COUNTED) for start in range(0, len(part), _COUNTED))
        return np.concatenate([(part.column(mask, some) == 1).sum(axis=1) for some in rows])
    spec = next(spec for spec in inputs if size in spec.shape[1:])
    return np.array([part.column(spec.name, slice(1)).shape[spec.shape.index(size, 1)]])


def _fills(
    inputs: Sequence[TensorSpec], size: str, mask: TensorSpec, ranges: InputRanges
) -> dict[str, float]:
    """Choose the fill of each input: 0, or the nearest value in the calibration data.

    With these fills, padded samples pass the server's check of inputs against the calibration data.
    """
    seen = {r.name: (r.lowest, r.highest) for r in ranges.inputs if r.name != mask.name}
    fills = {}
    for spec in inputs:
        if size in spec.shape[1:]:
            lowest, highest = seen.get(spec.name, (0.0, 0.0))
            fills[spec.name] = min(max(0.0, lowest), highest)
    return fills


class _Graph(NamedTuple):
    """A graph of the source model or of exits, and its outputs that are compared."""

    session: ort.InferenceSession
    read: tuple[str, ...]
    outputs: tuple[str, ...]


class _Answers(NamedTuple):
    """Shortened samples, and all outputs for each sample when run alone."""

    samples: list[dict[str, NDArray[Any]]]
    outputs: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Samples of many lengths, to be run alone and padded, for one more symbolic size."""

    specs: tuple[TensorSpec, ...]
    samples: Arrays
    """Samples as arrays [n, ...] by input; each sample has a position that counts."""
    sizes: tuple[Padding, ...]
    graphs: tuple[_Graph, ...]
    allowed: float
    """Largest relative difference that counts as rounding."""
    precision: str

    @classmethod
    def of(
        cls,
        model: SourceModel,
        graphs: tuple[_Graph, ...],
        samples: Arrays,
        sizes: tuple[Padding, ...],
    ) -> _Trial:
        counting = [np.any(samples[padding.mask] == 1, axis=1) for padding in sizes]
        rows = np.flatnonzero(np.logical_and.reduce(counting))[:_SAMPLES]
        # An 8-bit model may also round by the padded values, so it gets the tolerance of float32.
        rounding = rounding_of(model.proto)
        rounding = SINGLE if rounding == STEPS else rounding
        return cls(
            specs=model.inputs,
            samples={name: array[rows] for name, array in samples.items()},
            sizes=sizes,
            graphs=graphs,
            allowed=rounding.batches,
            precision=rounding.name,
        )

    def outcome(self) -> Padding | str:
        """Return the new padding, or the reason why there is none."""
        new, longest = self.sizes[-1], self._longest(self.sizes[-1].size)
        alone = self._alone(longest)
        if len(alone.samples) < 2:
            return "the calibration data has too few samples that count and can be shortened"
        everybody = list(range(len(alone.samples)))
        targets = {padding.size: self._longest(padding.size) for padding in self.sizes}
        worst = 0.0
        for content in (None, np.random.default_rng(0)):
            where, difference = self._padded(alone, everybody, targets, content)
            if not difference <= self.allowed:
                return (
                    f"padded to {longest}, `{where}` differs by {difference:.1e} of its scale "
                    f"from samples alone, allowed are {self.allowed:.0e} ({self.precision}): "
                    f"the mask {new.mask!r} does not hide all of what is padded"
                )
            worst = max(worst, difference)
        limit = self._limit(new.size)
        far = max(longest, min(limit or _PROBED, _FAR * longest))
        some = everybody[:: -(-len(everybody) // _FAR_SAMPLES)]
        if far > longest:
            difference = self._padded(alone, some, {**targets, new.size: far}, None)[1]
            if difference <= self.allowed:
                longest, worst = far, max(worst, difference)
        return replace(new, longest=longest, limit=limit, difference=worst)

    def _longest(self, size: str) -> int:
        """Return the length of the samples in a symbolic size."""
        spec, axis = next(_axes(self.specs, size))
        length: int = self.samples[spec.name].shape[axis]
        return length

    def _alone(self, longest: int) -> _Answers:
        """Run samples alone, shortened to lengths from 1 up; samples that fail are left out."""
        kept, answered = [], []
        count = len(next(iter(self.samples.values())))
        for row in range(count):
            sample = {name: array[row : row + 1] for name, array in self.samples.items()}
            for turn, padding in enumerate(self.sizes):
                # Sizes that were found before are shortened in another order.
                share = (row + turn * count // 2) % count / max(count - 1, 1)
                counts = int(np.argmax(sample[padding.mask][0] == 1)) + 1
                length = max(counts, 1 + round(share * (self._longest(padding.size) - 1)))
                sample = _resized(self.specs, sample, padding.size, np.arange(length))
            try:
                answered.append(self._run(sample))
            except RuntimeError as error:
                _log.debug("a sample of %d of %d positions fails: %s", row, longest, error)
                continue
            kept.append(sample)
        names = answered[0] if answered else ()
        return _Answers(kept, {name: np.concatenate([a[name] for a in answered]) for name in names})

    def _padded(
        self,
        alone: _Answers,
        rows: Sequence[int],
        targets: Mapping[str, int],
        content: np.random.Generator | None,
    ) -> tuple[str, float]:
        """Pad and run samples together; return the output that differs most, and by how much.

        Each sample is padded to the sizes in ``targets``, with fill values or, if ``content`` is
        given, with random values of the data.
        """
        filled = [self._filled(alone.samples[row], targets, content) for row in rows]
        batch = {name: np.concatenate([f[name] for f in filled]) for name in filled[0]}
        try:
            found = self._run(batch)
        except RuntimeError as error:
            return str(error), float("inf")
        differences = {
            name: relative_difference(
                array, alone.outputs[name][list(rows)], Scales.of(alone.outputs[name])
            )
            for name, array in found.items()
        }
        where = max(differences, key=lambda name: differences[name])
        return where, differences[where]

    def _filled(
        self, sample: Arrays, targets: Mapping[str, int], content: np.random.Generator | None
    ) -> Arrays:
        for padding in self.sizes:
            sample = pad(self.specs, sample, padding, targets[padding.size])
        if content is None:
            return sample
        hidden = {p.size: sample[p.mask][0] == 0 for p in self.sizes}
        masks = {padding.mask for padding in self.sizes}
        other = {name: array.copy() for name, array in sample.items()}
        for size, places in hidden.items():
            for spec, axis in _axes(self.specs, size):
                if spec.name not in masks:
                    values = np.moveaxis(other[spec.name], axis, 0)  # a view
                    chosen = content.choice(self.samples[spec.name].ravel(), values.shape)
                    values[places] = chosen[places]
        return other

    def _limit(self, size: str) -> int | None:
        """Return the largest size that the model accepts; ``None`` if at least ``_PROBED``."""
        takes, fails = self._longest(size), _PROBED
        if takes >= fails or self._takes(size, fails):
            return None
        while fails - takes > 1:
            middle = (takes + fails) // 2
            takes, fails = (middle, fails) if self._takes(size, middle) else (takes, middle)
        return takes

    def _takes(self, size: str, length: int) -> bool:
        sample = {name: array[:1] for name, array in self.samples.items()}
        again = np.arange(length) % self._longest(size)
        try:
            self._run(_resized(self.specs, sample, size, again))
        except RuntimeError:
            return False
        return True

    def _run(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Return the outputs of the source model and of exits; RuntimeError if the model fails."""
        found: dict[str, NDArray[Any]] = {}
        options = ort.RunOptions()
        options.log_severity_level = 4  # failures are expected here
        for graph in self.graphs:
            inputs = {name: feeds[name] for name in graph.read}
            try:
                values = graph.session.run(graph.outputs, inputs, options)
            except Exception as error:  # ONNX Runtime's own classes derive from Exception only
                raise RuntimeError(str(error).splitlines()[0]) from error
            found |= zip(graph.outputs, values, strict=True)
        return found


def pad(specs: Sequence[TensorSpec], sample: Arrays, padding: Padding, size: int) -> Arrays:
    """Pad samples [n, ...] to ``size``, which is at least their own size."""
    padded = dict(sample)
    for spec, axis in _axes(specs, padding.size):
        array = padded[spec.name]
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, size - array.shape[axis])
        padded[spec.name] = np.pad(array, widths, constant_values=padding.fills[spec.name])
    return padded


def _resized(
    specs: Sequence[TensorSpec], sample: Arrays, size: str, places: NDArray[np.intp]
) -> dict[str, NDArray[Any]]:
    """Take some positions of a sample from each input that has the symbolic size."""
    resized = dict(sample)
    for spec, axis in _axes(specs, size):
        resized[spec.name] = resized[spec.name].take(places, axis)
    return resized


def _axes(specs: Sequence[TensorSpec], size: str) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the inputs that have a symbolic size, and the dimension that has it."""
    for spec in specs:
        for axis, found in enumerate(spec.shape):
            if axis and found == size:
                yield spec, axis


def _load(graph: bytes, wanted: Sequence[str], threads: int) -> _Graph:
    session = make_session(graph, threads)
    given = {output.name for output in session.get_outputs()}
    read = tuple(tensor.name for tensor in session.get_inputs())
    return _Graph(session, read, tuple(name for name in wanted if name in given))
