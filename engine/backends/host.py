"""Batches of numpy arrays, slots and stages that all backends on CPU cores share.

A runtime only loads a graph (:class:`LoadedGraph`); everything else is the same for all runtimes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.answers.criteria import (
    STATE,
    CriterionError,
    HostCriterion,
    State,
    host_criterion,
    state_in,
)
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.assembly import CONFIDENCE, with_confidence
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch
from offramp.engine.stages.plan import LightGraph, StageSpec

_EMPTY = np.empty(0, np.float32)
_ZERO = np.float32(0)

Execute: TypeAlias = Callable[[Sequence[str], Mapping[str, NDArray[Any]], None], list[Any]]
"""Function that takes names of outputs, and inputs by name; it returns new arrays for the
caller."""


@dataclass(slots=True)  # not frozen: each stage makes one, and frozen ones take 4 times as long
class HostBatch:
    """Rows of named arrays of equal first dimension."""

    tensors: Mapping[str, NDArray[Any]]
    rows: int

    def __len__(self) -> int:
        return self.rows


class LoadedGraph(NamedTuple):
    """A graph that a runtime has loaded."""

    read: Collection[str]
    """Names of the graph's inputs."""
    given: Collection[str]
    """Names of the graph's outputs."""
    execute: Execute
    """Function that runs the graph; thread-safe."""


@dataclass(frozen=True, slots=True)
class HostStage:
    """A stage whose graph is loaded."""

    spec: StageSpec
    execute: Execute
    added: bool
    """``True`` if the graph outputs a confidence that was added when the stage was prepared."""
    inputs: tuple[str, ...]
    fetched: tuple[str, ...]
    """Outputs of the graph: answer and confidence first, if they exist, then ``computed``."""
    computed: tuple[str, ...]
    """Carried tensors (:attr:`.StageSpec.carried`) that are outputs of the graph."""
    passed: tuple[str, ...]
    """Carried tensors that are not outputs of the graph: graph inputs, outputs of earlier
    stages."""
    criterion: HostCriterion | None = None
    """Criterion that computes the confidence, where the graph does not."""


def load_stage(
    spec: StageSpec,
    runtime: str,
    load: Callable[[bytes, Path | None, WeightForm], LoadedGraph],
    *,
    maps_weights: bool = False,
) -> HostStage:
    """Load a stage's graph, with a confidence output added where possible.

    ``runtime`` is a name for messages. If the runtime ``maps_weights``, ``load`` gets graphs that
    name their weights, and the folder of the weights. The form that ``load`` gets is the stage's,
    unless the graph holds all of its weights itself. BackendError if the graph cannot be loaded, or
    its inputs and outputs differ from the manifest's.
    """
    added = False
    try:
        model, weights = spec.load_light() if maps_weights else LightGraph(spec.load(), None)
        of_logits = spec.task.kind == "classification" and "log" in spec.form
        if spec.answer and not spec.confidence and of_logits:
            with_it = with_confidence(model, spec.answer)
            model, added = with_it or model, with_it is not None
        read, given, execute = load(
            model, weights, spec.weight_form if weights else WeightForm.PACKED
        )
    except Exception as error:  # runtimes' own classes derive from Exception or RuntimeError only
        reason = " ".join(str(error).split())
        raise BackendError(f"{runtime} cannot load stage {spec.index}: {reason}") from error
    computed = tuple(name for name in spec.carried if name in given)
    confidence = CONFIDENCE if added else spec.confidence
    answered = tuple(name for name in (spec.answer, confidence) if name)
    passed = tuple(name for name in spec.carried if name not in given)
    if not (set(read) <= set(spec.inputs) and set(answered) <= set(given)):
        raise BackendError(
            f"{runtime} cannot load stage {spec.index}: its inputs are {sorted(read)}, its outputs "
            f"{sorted(given)}, the manifest says {sorted(spec.inputs)} and {list(answered)}; "
            "compile the model again"
        )
    try:
        criterion = host_criterion(spec.criterion)
    except CriterionError as error:
        raise BackendError(str(error)) from error
    return HostStage(
        spec, execute, added, spec.inputs, answered + computed, computed, passed, criterion
    )


class HostBackend:
    """A backend on the machine's cores; a runtime implements only :meth:`load`."""

    name: ClassVar[str]
    on_cpu = True
    runtime_name: ClassVar[str]
    """Name of the runtime in messages."""
    maps_weights: ClassVar[bool] = False
    """``True`` if :meth:`load` takes graphs that name their weights in a file."""

    def __init__(self, *, version: str, threads: int) -> None:
        """Keep the runtime's version, and the number of threads of each stage."""
        self._version, self._threads = version, threads

    @property
    def runtime(self) -> str:
        """Description of the runtime; measured times are valid only for this runtime."""
        return f"{self.runtime_name} {self._version}, {self._threads} threads"

    def load(
        self,
        model: bytes,
        weights: Path | None = None,
        form: WeightForm = WeightForm.PACKED,
    ) -> LoadedGraph:
        """Load a serialised graph; raises the runtime's exceptions.

        Only runtimes with :attr:`maps_weights` use ``weights``, the folder of the weights that the
        graph names, and ``form``, the form of these weights in memory.
        """
        raise NotImplementedError

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return the bundle itself: its graphs are run unchanged."""
        return bundle

    def sizes(self, most: int) -> Sequence[int]:
        """Return all batch sizes: the first run at each one allocates memory or chooses kernels."""
        return range(1, most + 1)

    def missing(self, stage: HostStage) -> None:
        """Return ``None``: nothing has to be built."""

    def prepare(self, spec: StageSpec) -> HostStage:
        """Load a stage, with a confidence output added where possible."""
        return load_stage(spec, self.runtime_name, self.load, maps_weights=self.maps_weights)

    def open_slot(self) -> HostSlot:
        """Open a slot; slots of a CPU hold no resources."""
        return HostSlot()

    def close(self) -> None:
        """Do nothing: graphs are freed with the last reference to them."""


class HostSlot:
    """Runs stages on the calling thread."""

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> HostBatch:
        """Return a batch of the same arrays, without copies."""
        return HostBatch(tensors, len(next(iter(tensors.values()))))

    def run(
        self,
        stage: HostStage,
        batch: TensorBatch,
        threshold: float | None = None,  # noqa: ARG002
    ) -> StageResult:
        """Execute a stage on the calling thread."""
        assert isinstance(batch, HostBatch)
        # This code runs between the convolutions of two stages, with cold caches: every call of
        # numpy takes 10 to 30 µs. So it makes as few calls as possible.
        spec, tensors = stage.spec, batch.tensors
        try:
            outputs = stage.execute(stage.fetched, {n: tensors[n] for n in stage.inputs}, None)
        except Exception as error:
            where = f"stage {spec.index} failed on {len(batch)} rows"
            raise BackendError(f"{where}: {' '.join(str(error).split())}") from error
        answer, confidence = None, _EMPTY
        if spec.confidence is not None:
            answer, confidence, *outputs = outputs
        elif stage.added:
            answer, confidence, *outputs = outputs
            confidence = np.fmax(confidence, _ZERO)  # instead of NaN
        elif spec.answer is not None:
            answer, *outputs = outputs
            confidence = confidence_of(answer, spec.form, spec.task)
        state: State = {}
        if stage.criterion is not None and answer is not None:
            confidence, state = stage.criterion.serve(answer, state_in(tensors))
        if not spec.carried:
            return StageResult(answer, confidence, None)
        carried = dict(zip(stage.computed, outputs))  # noqa: B905, as many as were fetched
        for name in stage.passed:
            carried[name] = tensors[name]
        for name, array in state.items():
            carried[STATE + name] = array
        return StageResult(answer, confidence, HostBatch(carried, batch.rows))

    def select(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        """Copy the given rows, unless these are all rows of the batch."""
        assert isinstance(batch, HostBatch)
        if len(rows) == len(batch):
            return batch
        kept = {name: array.take(rows, axis=0) for name, array in batch.tensors.items()}
        return HostBatch(kept, len(rows))

    def buffer(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        """Copy the given rows; all slots can read host memory."""
        return self.select(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> HostBatch:
        """Concatenate rows of the parts, in their order."""
        chosen = [self.select(batch, rows).tensors for batch, rows in parts]
        # A criterion whose function failed on one part has no state there: its state starts again.
        names = [name for name in chosen[0] if all(name in tensors for tensors in chosen)]
        joined = {name: np.concatenate([tensors[name] for tensors in chosen]) for name in names}
        return HostBatch(joined, sum(len(rows) for _, rows in parts))

    def close(self) -> None:
        """Do nothing: slots of a CPU hold no resources."""
