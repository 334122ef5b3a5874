"""The prepared stages of a backend, and their users.

The backend returns handles. When the last reference to a handle is gone, on any thread, the stage
is only marked: the slots that own its executables close them, on their own threads, and the stage
itself is closed after the last of them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.batch_sizes import padded
from offramp.engine.cuda.device_batch import size_of
from offramp.engine.cuda.executable import Executable, PreparedStage, SlotResources
from offramp.engine.cuda.memory import Needs
from offramp.engine.kernels.kernel_arguments import CheckKind, ScoreType
from offramp.engine.stages.plan import StageSpec

_SCORE_TYPES: dict[np.dtype[Any], ScoreType] = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheck:
    """The kernel's exit check after a stage."""

    scores: str
    """Name of the stage's output that the check reads."""
    score_type: ScoreType
    kind: CheckKind
    classes: int


def check_of(spec: StageSpec, dtype: np.dtype[Any], classes: int) -> StageCheck | None:
    """Return the exit check after a stage, by the type of its confidence, or else of its answer.

    A confidence that the graph computes is checked as the only probability of its row: thresholds
    were tuned on these numbers, so they are compared unchanged. ``None`` if the stage has no
    answer, or one of a type or task that the kernels do not support.
    """
    score_type = _SCORE_TYPES.get(dtype)
    if spec.answer is None or score_type is None:
        return None
    if spec.confidence is not None:
        kind, classes, scores = CheckKind.PROBABILITIES, 1, spec.confidence
    elif spec.task.kind != "classification" or spec.form == "values":
        return None  # computed on the host
    else:
        kind = CheckKind.PROBABILITIES if spec.form == "probabilities" else CheckKind.LOGITS
        scores = spec.answer
    return StageCheck(scores=scores, score_type=score_type, kind=kind, classes=classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """Facts of a prepared stage that slots need."""

    number: int
    """Number of the stage, never used twice in a backend."""
    prepared: PreparedStage
    check: StageCheck | None
    """The kernel's exit check after the stage; ``None`` if the stage has none."""
    given: frozenset[str]
    """Carried tensors that are outputs of the stage; the others pass through."""

    @property
    def spec(self) -> StageSpec:
        """Specification of the prepared stage."""
        return self.prepared.spec


class CudaStage:
    """Handle of a prepared stage, which exists as long as it is referenced."""

    __slots__ = ("__weakref__", "facts")

    def __init__(self, facts: StageFacts) -> None:
        self.facts = facts


@dataclass(slots=True, kw_only=True)
class _Record:
    facts: StageFacts
    executables: int = 0
    dropped: bool = False
    """``True`` if the stage's handle is not referenced any more."""


@dataclass(slots=True)
class StageRegistry:
    """All stages of a backend that are not closed; thread-safe."""

    drops: int = 0
    """Number of stages dropped so far; slots compare it to detect new drops."""
    _records: dict[int, _Record] = field(default_factory=dict)
    _dropped: deque[int] = field(default_factory=deque)
    """Numbers of dropped stages. Finalisers append to it on any thread at any point, so without a
    lock."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _drops: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _used: Needs = field(default_factory=Needs)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, prepared: PreparedStage) -> CudaStage:
        """Register a stage; BackendError if its outputs do not fit its spec."""
        facts = facts_of(prepared, next(self._numbers))
        with self._lock:
            self._records[facts.number] = _Record(facts=facts)
        stage = CudaStage(facts)
        weakref.finalize(stage, self._drop, facts.number).atexit = False
        return stage

    def needs(self) -> Needs:
        """Return the memory that suffices for all stages in use."""
        with self._lock:
            self._note_dropped()
            live = [record.facts for record in self._records.values() if not record.dropped]
            used = self._used
        read = [(t.name, t.row_bytes) for facts in live for t in facts.prepared.inputs]
        row_bytes: dict[str, int] = {}
        for name, size_bytes in read:
            row_bytes[name] = max(size_bytes, row_bytes.get(name, 0))
        return reduce(Needs.most, (needs_of(facts.prepared, row_bytes) for facts in live), used)

    def sizes(self, most: int) -> Sequence[int]:
        """Return the padded sizes of batches of up to ``most`` rows, ascending."""
        with self._lock:
            self._note_dropped()
            live = [record.facts for record in self._records.values() if not record.dropped]
        stages = [facts.prepared for facts in live]
        if not all(stage.pads for stage in stages):
            return range(1, most + 1)
        rows = range(1, most + 1)
        return sorted(
            {padded(n, min(stage.padding_limit(n), most)) for stage in stages for n in rows}
        )

    def remember(self, used: Needs) -> None:
        """Record the sizes that a slot had to grow to, for the initial sizes of later slots."""
        with self._lock:
            self._used = self._used.most(used)

    def open(self, facts: StageFacts, resources: SlotResources) -> Executable:
        """Make a stage's executable in a slot; :meth:`close` must follow."""
        with self._lock:
            self._records[facts.number].executables += 1
        try:
            return facts.prepared.open(resources)
        except BaseException:
            self._count_down(facts)
            raise

    def close(self, facts: StageFacts, executable: Executable) -> None:
        """Close an executable of :meth:`open`."""
        try:
            executable.close()
        finally:
            self._count_down(facts)

    def is_dropped(self, facts: StageFacts) -> bool:
        """Return whether a stage cannot be run any more."""
        with self._lock:
            self._note_dropped()
            return self._records[facts.number].dropped

    def sweep(self) -> None:
        """Close stages without handles and executables; a context is current."""
        with self._lock:
            self._note_dropped()
            over = [r for r in self._records.values() if r.dropped and not r.executables]
            for record in over:
                del self._records[record.facts.number]
        _close(over)

    def close_all(self) -> None:
        """Close every stage, even if it is still referenced.

        BackendError if some still have executables; the others are closed.
        """
        with self._lock:
            records, self._records = list(self._records.values()), {}
        _close([record for record in records if not record.executables])
        left = [str(r.facts.spec.index) for r in records if r.executables]
        if left:
            raise BackendError(f"stages {', '.join(left)} are still open in slots")

    def _drop(self, number: int) -> None:
        self._dropped.append(number)
        self.drops = next(self._drops)

    def _note_dropped(self) -> None:
        while self._dropped:
            record = self._records.get(self._dropped.popleft())
            if record is not None:
                record.dropped = True

    def _count_down(self, facts: StageFacts) -> None:
        with self._lock:
            record = self._records.get(facts.number)
            if record is not None:
                record.executables -= 1


def _close(records: Sequence[_Record]) -> None:
    with ExitStack() as releases:
        for record in records:
            releases.callback(record.facts.prepared.close)


def facts_of(prepared: PreparedStage, number: int) -> StageFacts:
    """Return the facts that slots need; BackendError if an output is missing or unreadable."""
    spec = prepared.spec
    outputs = {tensor.name: tensor for tensor in prepared.outputs}
    lacking = [name for name in (spec.answer, spec.confidence) if name and name not in outputs]
    if lacking:
        raise BackendError(
            f"stage {spec.index} lacks outputs {', '.join(lacking)}; it has {sorted(outputs)}"
        )
    check = None
    if spec.answer is not None:
        answer = outputs[spec.answer]
        if answer.dtype == np.uint16:  # bits: as numbers they would be a wrong answer
            raise BackendError(
                f"stage {spec.index} returns its answer {answer.name} as bfloat16 or uint16, which "
                "cannot be read; expected float32 or float16, for instance by a Cast before the "
                "output"
            )
        scores = outputs[spec.confidence] if spec.confidence else answer
        check = check_of(spec, scores.dtype, answer.sample_shape[-1])
        if check is None and spec.confidence:
            raise BackendError(
                f"stage {spec.index} returns its confidence as {scores.dtype}, expected float32 or "
                "float16"
            )
    return StageFacts(
        number=number,
        prepared=prepared,
        check=check,
        given=frozenset(name for name in spec.carried if name in outputs),
    )


def needs_of(prepared: PreparedStage, row_bytes: Mapping[str, int]) -> Needs:
    """Return a stage's needs of a slot, with the largest batch.

    ``row_bytes`` are the row sizes of inputs that pass through it, which the stage may not know;
    missing ones count as 0, and make a slot grow when they occur.
    """
    spec, rows = prepared.spec, prepared.max_rows
    read = {tensor.name: tensor.row_bytes for tensor in prepared.inputs}
    given = {tensor.name: tensor.row_bytes for tensor in prepared.outputs}
    passed = {name: row_bytes.get(name, 0) for name in spec.carried if name not in given}
    before = size_of((passed | read).values(), rows)
    after = size_of(
        [given[name] if name in given else (passed | read)[name] for name in spec.carried], rows
    )
    return Needs(
        input_bytes=max(before, after),
        output_bytes=size_of(given.values(), rows),
        scratch_bytes=prepared.scratch_bytes,
        upload_bytes=before if spec.first_segment == 0 else 0,
        answer_bytes=rows * given[spec.answer] if spec.answer else 0,
        rows=rows,
    )
