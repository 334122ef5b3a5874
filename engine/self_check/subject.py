"""A bundle on a backend, for checks: prepared stages, inputs, and reference results.

Some inputs are random, some at the ends of their ranges, and some broken (NaN, infinity). A bundle
has no samples, only facts from calibration: shapes, and for most inputs the smallest and the
largest element. If these elements are missing, the graph shows the length of the tables that
integer inputs index.

The reference is the bundle's segments, one after the other, in plain ONNX Runtime on the CPU, with
one session for each unchanged file. The graph changes of backends (fused stages, blocked layouts,
added confidences, other precisions) are not applied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle, TensorSpec
from offramp.certify import MODEL_END, NEVER
from offramp.engine.answers.differences import Scales, relative_difference
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends import Backend, Slot, StageResult, TensorBatch
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.assembly import ModelProto, carries_steps, give_steps, has_half_precision
from offramp.engine.graphs.external_weights import graphs_of
from offramp.engine.self_check.check_results import CheckFailedError
from offramp.engine.stages.backend_protocol import Stage
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec


class StageAnswer(NamedTuple):
    """Answers of a stage to a batch of b rows."""

    spec: StageSpec
    answer: NDArray[Any]
    """Answers, [b, classes]."""
    confidence: NDArray[np.float32]
    """Confidences of these answers, [b]."""


class TrueStage(NamedTuple):
    """Reference results at a stage's end, for all samples of a subject."""

    answer: NDArray[Any] | None
    confidence: NDArray[np.float32] | None
    carried: Mapping[str, NDArray[Any]]


@dataclass(kw_only=True)
class CheckSubject:
    """A bundle's stages on a backend; used by one check at a time.

    Its samples are ``max_rows`` (at least 7) random samples, followed by samples at the ends of the
    inputs' ranges.
    """

    name: str
    bundle: Bundle
    backend: Backend
    plan: Plan
    stages: tuple[Stage, ...]
    max_rows: int
    tolerance: float
    """Allowed difference from the reference, relative to an element's scale."""
    threads: int = 1
    """Number of threads with which the reference is computed."""

    @cached_property
    def maker(self) -> InputMaker:
        """Object that makes inputs in the ranges of the calibration data."""
        return InputMaker(self.bundle)

    @property
    def drawn_rows(self) -> int:
        """Number of random samples."""
        return max(self.max_rows, 7)

    @cached_property
    def samples(self) -> Inputs:
        """Inputs of all samples: random ones, then extreme ones."""
        return join(self.maker.drawn(self.drawn_rows), self.maker.extreme_inputs())

    @cached_property
    def sample_count(self) -> int:
        """Number of all samples, random and extreme."""
        return len(next(iter(self.samples.values())))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes to run: 1, 2, 7 and the largest, as far as allowed."""
        return tuple(sorted({min(size, self.max_rows) for size in (1, 2, 7, self.max_rows)}))

    @cached_property
    def truth(self) -> tuple[TrueStage, ...]:
        """Reference results of all samples at the end of each stage; computed once."""
        specs, manifest = self.plan.stages, self.bundle.manifest
        exits = {s.exit for s in specs if s.exit is not None and s.exit != MODEL_END}
        names = {n for s in specs for n in (s.answer, s.confidence, *s.carried) if n is not None}
        given = set(self.samples)
        found = ChainedReference(self.bundle, exits, threads=self.threads).run(
            self.samples, names - given
        )
        found |= {name: self.samples[name] for name in names & given}
        stages = []
        for spec in specs:
            answer = None if spec.answer is None else found[spec.answer]
            confidence = None
            if answer is not None:
                own = confidence_of(answer, manifest.answer.form, manifest.answer.task)
                confidence = own if spec.confidence is None else found[spec.confidence]
            carried = {name: found[name] for name in spec.carried}
            stages.append(TrueStage(answer, confidence, carried))
        return tuple(stages)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Open a slot for the duration of the block."""
        opened = self.backend.open_slot()
        try:
            yield opened
        finally:
            opened.close()

    def release(self) -> None:
        """Release the stages; nothing can be run any more."""
        self.stages = ()
        self.__dict__.pop("some_exiting", None)

    def follow(
        self, slot: Slot, inputs: Mapping[str, NDArray[Any]]
    ) -> Iterator[tuple[StageSpec, StageResult]]:
        """Run a batch through all stages, with no sample leaving; yield their results."""
        batch: TensorBatch = slot.upload(inputs)
        for spec, stage in zip(self.plan.stages, self.stages, strict=True):
            result = slot.run(stage, batch, NEVER)
            yield spec, result
            if result.carry is not None:
                batch = result.carry

    def before(self, slot: Slot, inputs: Mapping[str, NDArray[Any]], stage: int) -> TensorBatch:
        """Run a batch up to a stage; return the stage's input."""
        batch: TensorBatch = slot.upload(inputs)
        for each in self.stages[:stage]:
            carry = slot.run(each, batch, NEVER).carry
            assert carry is not None, "only the last stage carries nothing"
            batch = carry
        return batch

    def answers(self, slot: Slot, inputs: Mapping[str, NDArray[Any]]) -> list[StageAnswer]:
        """Run a batch through all stages; return the answers of the stages that have one."""
        found = []
        for spec, (answer, confidence, _) in self.follow(slot, inputs):
            if answer is not None:
                found.append(StageAnswer(spec, answer, confidence))
        return found

    def pipeline(self, thresholds: Sequence[float] | None = None) -> Pipeline:
        """Return the stages in leave mode; ``thresholds``, one a stage, replace the policy's."""
        given = [spec.threshold for spec in self.plan.stages] if thresholds is None else thresholds
        specs = tuple(
            replace(spec, threshold=float(np.float32(threshold)))
            for spec, threshold in zip(self.plan.stages, given, strict=True)
        )
        plan = Plan(stages=specs, policy_version=self.plan.policy_version, mode=Mode.LEAVE)
        return Pipeline(self.backend, plan, prepare=lambda spec: self.stages[spec.index])

    @cached_property
    def some_exiting(self) -> Pipeline:
        """Return the stages with thresholds at which some samples leave.

        Each threshold is in the widest gap between two confidences, so rounding moves no sample
        over it.
        """
        return self.pipeline([_separating_threshold(stage) for stage in self.truth])


def _separating_threshold(stage: TrueStage) -> float:
    if stage.confidence is None or not stage.carried:
        return NEVER if stage.carried else 0.0
    sure = np.sort(stage.confidence[np.isfinite(stage.confidence)].astype(np.float64))
    if len(sure) < 2 or sure[0] == sure[-1]:
        return NEVER
    widest = int(np.argmax(np.diff(sure)))
    return float(sure[widest] + sure[widest + 1]) / 2


def difference(found: NDArray[Any], wanted: NDArray[Any], scales: Scales | None = None) -> float:
    """Return the largest difference over elements that are finite in ``wanted``.

    The difference is relative to ``scales``, by default the scales of ``wanted``. The result is
    infinite if only ``found`` is not finite, or has another shape; it is 0 if there is nothing to
    compare.
    """
    if found.shape == wanted.shape:
        wanted = wanted.astype(np.float64)
        found = np.where(np.isfinite(wanted), found.astype(np.float64), wanted)
    return relative_difference(found, wanted, scales)


def confidence_scale(answers: NDArray[Any]) -> Scales:
    """Return the scale of confidences: absolute errors of logits pass through a softmax."""
    return Scales.fixed(max(1.0, Scales.of(answers).ordinary))


def fail_beyond(allowed: float, worst: float, where: str, facts: dict[str, Any]) -> None:
    """Raise CheckFailedError if a difference is larger than allowed."""
    if not worst <= allowed:
        raise CheckFailedError(
            f"{where} differs by {worst:.1e} of its scale, allowed is {allowed:.1e}",
            facts,
        )


Inputs: TypeAlias = dict[str, NDArray[Any]]
"""Inputs by name: [rows, …], with the same number of rows."""


_HANDING_ON = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten"})


class _Ends(NamedTuple):
    low: float
    high: float


class InputMaker:
    """Makes inputs for a bundle's model, the same ones every time."""

    def __init__(self, bundle: Bundle) -> None:
        self._inputs = bundle.manifest.inputs
        self._shapes = bundle.manifest.calibration.sample_shapes
        self._ends = {tensor.name: _ends(bundle, tensor) for tensor in self._inputs}

    def drawn(self, rows: int) -> Inputs:
        """Return random samples, uniform in the range of each input."""
        rng = np.random.default_rng(0)
        return {
            tensor.name: self._fitted(tensor, rng.random((rows, *self._shapes[tensor.name])))
            for tensor in self._inputs
        }

    def extreme_inputs(self) -> Inputs:
        """Return three samples: all elements are smallest, all are largest, or they alternate."""
        made = {}
        for tensor in self._inputs:
            shape = self._shapes[tensor.name]
            turns = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 2
            shares = np.stack([np.zeros(shape), np.ones(shape), turns])
            made[tensor.name] = self._fitted(tensor, shares)
        return made

    def broken(self, rows: int) -> Inputs | None:
        """Return random samples whose first elements are NaN, or infinite in every second sample.

        ``None`` if the dtype of no input allows such elements.
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
        """Convert shares of an input's range, 0 to 1, to elements of the input."""
        low, high = self._ends[tensor.name]
        dtype = np.dtype(tensor.dtype)
        if dtype.kind == "f":
            return (low + shares * (high - low)).astype(dtype)
        elements = np.minimum(np.floor(low + shares * (high - low + 1)), high).astype(dtype)
        if (low, high) == (0, 1) and elements[0].size > 1:
            elements.reshape(len(elements), -1)[:, 0] = 1  # a mask must not hide a whole sample
        return elements


def take(inputs: Inputs, rows: NDArray[np.intp] | slice) -> Inputs:
    """Return some rows of inputs, as separate arrays."""
    return {name: np.ascontiguousarray(array[rows]) for name, array in inputs.items()}


def join(*parts: Inputs) -> Inputs:
    """Concatenate samples of several sets of inputs."""
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
    """Yield the lengths of the tables that an input indexes, anywhere in the model."""
    manifest, names = bundle.manifest, {name}
    parts = [(part.inputs, part.file) for part in manifest.segments]
    parts += [(part.inputs, part.file) for part in manifest.exits]
    for inputs, file in parts:
        if not names.isdisjoint(inputs):
            graph = ModelProto.FromString(bundle.graph(file)).graph
            yield from _lengths_in(graph, names)


def _lengths_in(graph: Any, names: set[str]) -> Iterator[int]:
    """Yield the lengths of a graph's tables; add tensors that pass indices on to ``names``."""
    tables = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    for node in graph.node:  # in the order of execution
        if node.op_type in _HANDING_ON and node.input[0] in names:
            names.add(node.output[0])
        elif node.op_type == "Gather" and node.input[1] in names and node.input[0] in tables:
            yield int(tables[node.input[0]])


_ROWS = 8
"""Number of rows in a run of the reference, which limits its memory."""


class ChainedReference:
    """Runs segments, and the requested exits, on the CPU."""

    def __init__(self, bundle: Bundle, exits: Collection[int], *, threads: int = 1) -> None:
        """Load the needed graphs; BackendError if ONNX Runtime refuses one."""
        manifest = bundle.manifest
        files = [segment.file for segment in manifest.segments]
        files += [manifest.exits[index].file for index in sorted(exits)]
        self._rows = 1 if manifest.no_batching else _ROWS
        with graphs_of(bundle) as read:
            self._sessions = [_session(read(file), file, threads) for file in files]
            self._integers = {
                before.output: _session(
                    give_steps(read(before.file), before.output), before.file, threads
                )
                for before, after in pairwise(manifest.segments[: manifest.source_begins])
                if carries_steps(read(before.file), read(after.file), before.output)
            }
        """Sessions that compute the integers of cut tensors which stages carry as integers."""

    def run(self, inputs: Inputs, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return tensors by name, [rows, …]: cut tensors, answers and confidences of exits.

        Cut tensors have the form in which stages carry them: some as integers, channels last.
        """
        rows = len(next(iter(inputs.values())))
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in wanted}
        for start in range(0, rows, self._rows):
            known: dict[str, Any] = take(inputs, slice(start, start + self._rows))
            for session in self._sessions:
                names = [output.name for output in session.get_outputs()]
                feed = {argument.name: known[argument.name] for argument in session.get_inputs()}
                known |= zip(names, session.run(names, feed), strict=True)
            for name in wanted:
                session = self._integers.get(name)
                if session is None:
                    parts[name].append(known[name])
                    continue
                feed = {argument.name: known[argument.name] for argument in session.get_inputs()}
                parts[name].append(session.run([name], feed)[0])
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _session(model: bytes, file: str, threads: int) -> ort.InferenceSession:
    options = session_options()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    if has_half_precision(model):
        # ONNX Runtime 1.30 and 1.31 crashed in their blocked layouts of float16 convolutions.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return load_session(model, options)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        raise BackendError(f"ONNX Runtime cannot load {file}: {error}") from error
