"""Plans: the stages in which a model is executed under a policy.

A stage runs between two adjacent active exits: the segments between them as one graph, with the
exit fused in (:mod:`.graphs.assembly`). In a cascade the source model is the last segment, and
starts from the model's inputs. The stage that ends with the source model's answer is this segment
alone; segments of the quantised model after the last exit do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from offramp.bundle import (
    CLASSIFICATION,
    ActiveExit,
    Answer,
    AnswerForm,
    AnswerTask,
    Bundle,
    Exit,
    ExitPolicy,
    Segment,
    TensorSpec,
)
from offramp.bundle.schema.answers import PROBABILITY, Criterion
from offramp.bundle.schema.parts import last_beginning
from offramp.certify import MODEL_END, NEVER
from offramp.certify.agreement import float32_at_least
from offramp.engine.graphs.assembly import ReadPart, assemble_stage
from offramp.engine.graphs.external_weights import WeightForm, is_text


class Mode(StrEnum):
    """The serving modes: what happens to a sample that reaches the threshold of an exit."""

    LEAVE = "leave"
    """The sample leaves the batch, and its further compute is saved (PAME, E3)."""
    AUDIT = "audit"
    """The sample leaves, or with a known, small probability runs on after its answer. So agreement
    is measured, while nearly all the compute is saved."""
    RELEASE = "release"
    """The answer is sent immediately, and the sample always runs on (Apparate)."""
    OFF = "off"
    """Exits are off: the unmodified model runs as one graph."""

    @property
    def observed(self) -> bool:
        """True if answers are compared with the unmodified model's while serving."""
        return self in (Mode.AUDIT, Mode.RELEASE)


class LightGraph(NamedTuple):
    """A graph that may refer to weights in a file instead of containing them."""

    model: bytes
    weights: Path | None
    """Folder of the weight file; ``None`` if the graph refers to no file."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A recipe that makes a stage's graph from a bundle's files; a call returns the graph."""

    make: Callable[[ReadPart], bytes]
    read: ReadPart

    def __call__(self) -> bytes:
        """Make the graph, reading the files."""
        return self.make(self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, ready to be prepared by a backend."""

    index: int
    first_segment: int
    last_segment: int
    exit: int | None
    """Index into ``Manifest.exits`` of the exit at the stage's end; ``MODEL_END`` if it ends with
    the model's own answer, ``None`` without any answer."""
    load: Callable[[], bytes]
    """Returns the stage's ONNX graph; called by the backend when it prepares the stage. It is a
    :class:`StageGraph` if the graph is made from a bundle's files only."""
    inputs: tuple[str, ...]
    """Tensors that the graph reads."""
    carried: tuple[str, ...]
    """Tensors that later stages read: cut tensors first, then graph inputs that pass through. There
    are no cut tensors if the next stage starts from the model's inputs."""
    given: tuple[str, ...] = ()
    """Tensors of ``carried`` that the graph produces; others pass through."""
    answer: str | None
    """Name of the answer among the graph's outputs, if there is one."""
    confidence: str | None = None
    """Name of the answer's confidence output; without one, the backend computes the confidence."""
    form: AnswerForm
    task: AnswerTask = CLASSIFICATION
    criterion: Criterion = PROBABILITY
    """Criterion that computes the confidence on the host, if the graph has no ``confidence``
    output."""
    threshold: float
    """Smallest confidence with which a row leaves. It is the policy's threshold, rounded up to
    float32, so that no row leaves below the threshold; 0 in the last stage, where every row leaves.
    """
    unmodified: bool = False
    """True if the graph is the source model's own."""
    weight_form: WeightForm = WeightForm.PACKED
    """Form of the stage's weights in memory, if the backend maps weights from the bundle."""
    bundle: Bundle | None = field(default=None, compare=False, repr=False)
    """The stage's bundle, for backends that use more of it than graphs; ``None`` while the compiler
    has not written it."""

    def load_light(self) -> LightGraph:
        """Return the stage's graph without the weights that the bundle stores in a file.

        A runtime that maps the weights from this file keeps them in memory once for all graphs.
        Raises the errors of ``load``, which returns the same graph with all its weights.
        """
        bundle, graph = self.bundle, self.load
        if bundle is not None and isinstance(graph, StageGraph):
            folder = bundle.weight_folder()
            if folder is not None and is_text(folder):
                return LightGraph(graph.make(bundle.graph), folder)
        return LightGraph(graph(), None)

    @property
    def final(self) -> bool:
        """True if the stage ends with the model's own answer."""
        return not self.carried

    @property
    def answered_by(self) -> int:
        """Exit that gives the stage's answer, or ``MODEL_END``; the stage must have an answer."""
        assert self.exit is not None, f"stage {self.index} gives no answer"
        return self.exit

    @property
    def unit(self) -> tuple[int, int, int | None]:
        """First and last segment, and the fused exit, if any: the parts of the graph.

        In a cascade, graphs of one unit may differ: some output the cut tensor, others do not.
        """
        fused = None if self.exit == MODEL_END else self.exit
        return self.first_segment, self.last_segment, fused


class ModelStructure(Protocol):
    """The part of a manifest that plans need; the compiler plans before it has a manifest."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs."""

    @property
    def answer(self) -> Answer:
        """The model's own answer."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the model, from the input on."""

    @property
    def exits(self) -> tuple[Exit, ...]:
        """The exits, in depth order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages of a model under a policy."""

    stages: tuple[StageSpec, ...]
    policy_version: int
    mode: Mode

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits in use, in depth order."""
        return tuple(s.exit for s in self.stages if s.exit is not None and s.exit != MODEL_END)


def exit_label(exit_index: int) -> str:
    """Return the name of an exit, or of the model's end, in metrics: ``exit 3`` or ``final``."""
    return "final" if exit_index == MODEL_END else f"exit {exit_index}"


def make_plan(
    bundle: Bundle,
    policy: ExitPolicy | None = None,
    mode: Mode = Mode.LEAVE,
    *,
    borders: Collection[int] = (),
) -> Plan:
    """Plan the stages between the active exits of ``policy`` (default: the bundle's own).

    If the model is split among devices, a stage also ends after each segment of ``borders``; in
    mode off, stages do not end there.
    """
    policy = bundle.policy if policy is None else policy
    if mode is Mode.OFF:
        return Plan(stages=(source_stage(bundle),), policy_version=policy.version, mode=mode)
    # In modes with observation, exits that answer nothing run in shadow mode.
    active = [a for a in policy.active if a.threshold < NEVER or mode.observed]
    if bundle.number and (not active or active[-1].exit != bundle.manifest.exits[-1].index):
        # Samples that no exit of a subnet is sure of end at its own answer.
        active.append(ActiveExit(exit=bundle.manifest.exits[-1].index, threshold=NEVER))
    stages = _of(bundle, plan_stages(bundle.manifest, bundle.read, active, borders))
    return Plan(stages=stages, policy_version=policy.version, mode=mode)


def plan_stages(
    structure: ModelStructure,
    read: ReadPart,
    active: Sequence[ActiveExit],
    borders: Collection[int] = (),
) -> tuple[StageSpec, ...]:
    """Plan the stages between exits, in depth order; ``read`` returns the content of a part's file.

    If an exit's decision depends on earlier exits, all exits up to the last exit in ``active`` run.
    After segments of ``borders`` that have no such exit, stages end without an answer. Borders
    after the last exit of a cascade's quantised model are ignored, because that part does not run.
    """
    if structure.answer.criterion.depends_on_earlier and active:
        active = all_up_to(active)
    ends: list[tuple[int, int | None, float]] = [
        (structure.exits[a.exit].after_segment, a.exit, a.threshold) for a in active
    ]
    last, exits_end = len(structure.segments) - 1, {end for end, _, _ in ends}
    if last_beginning(structure.segments) > 0:  # only the copy in front can be cut inside
        last_exit = max(exits_end, default=0)
        borders = [border for border in borders if border < last_exit]
    ends += [(b, None, NEVER) for b in set(borders) - exits_end if 0 <= b < last]
    ends.sort(key=itemgetter(0))
    return tuple(_stages(structure, read, [*ends, (last, MODEL_END, 0.0)]))


def all_up_to(active: Sequence[ActiveExit]) -> tuple[ActiveExit, ...]:
    """Add all missing exits before the last active exit, with threshold ``NEVER``."""
    thresholds = {a.exit: a.threshold for a in active}
    exits = range(max(thresholds) + 1)
    return tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)


def make_chained_plan(bundle: Bundle) -> Plan:
    """Plan every segment of the source model as its own stage, without exits.

    The answers equal those of one graph, except that sums are rounded in another order. Every cut
    costs time. In a cascade the source model is one segment.
    """
    stages = _of(bundle, chain_stages(bundle.manifest, bundle.read))
    return Plan(stages=stages, policy_version=0, mode=Mode.OFF)


def chain_stages(structure: ModelStructure, read: ReadPart) -> tuple[StageSpec, ...]:
    """Plan the source model's segments as stages, without exits; see :func:`make_chained_plan`."""
    last = structure.segments[-1]
    inner = structure.segments[last_beginning(structure.segments) : -1]
    ends = [(segment.index, None, NEVER) for segment in inner]
    return tuple(_stages(structure, read, [*ends, (last.index, MODEL_END, 0.0)]))


def source_stage(bundle: Bundle) -> StageSpec:
    """Plan the unmodified model as one stage."""
    manifest = bundle.manifest
    return StageSpec(
        index=0,
        first_segment=manifest.source_begins,
        last_segment=len(manifest.segments) - 1,
        exit=MODEL_END,
        load=StageGraph(lambda read: read(manifest.source.file), bundle.read),
        inputs=tuple(tensor.name for tensor in manifest.inputs),
        carried=(),
        answer=manifest.answer.output,
        form=manifest.answer.form,
        task=manifest.answer.task,
        threshold=0.0,
        unmodified=True,
        bundle=bundle,
    )


def _of(bundle: Bundle, stages: Sequence[StageSpec]) -> tuple[StageSpec, ...]:
    return tuple(replace(stage, bundle=bundle) for stage in stages)


def _stages(
    structure: ModelStructure,
    read: ReadPart,
    ends: Sequence[tuple[int, int | None, float]],
) -> Iterator[StageSpec]:
    after = [last + 1 for last, _, _ in ends]
    firsts = [
        max(start, last_beginning(structure.segments[:stop]))
        for start, stop in zip([0, *after[:-1]], after, strict=True)
    ]
    for index, (last, exit_index, threshold) in enumerate(ends):
        final = exit_index == MODEL_END
        yield make_stage(
            structure,
            read,
            index=index,
            first=firsts[index],
            last=last,
            exit_index=exit_index,
            carried=() if final else carried_over(structure, last, firsts[index + 1]),
            threshold=float(float32_at_least(np.array(threshold))),
        )


def make_stage(
    structure: ModelStructure,
    read: ReadPart,
    *,
    index: int,
    first: int,
    last: int,
    exit_index: int | None,
    carried: tuple[str, ...],
    threshold: float,
) -> StageSpec:
    """Plan the stage of segments ``first`` to ``last``, which ends with an exit or the model's end.

    ``carried`` are the tensors that later stages read; the graph outputs those that it computes.
    """
    final = exit_index == MODEL_END
    exit_ = None if exit_index is None or final else structure.exits[exit_index]
    answer = structure.answer.output if final else None
    segments = structure.segments[first : last + 1]
    written = [name for segment in segments for name in segment.outputs]
    given = tuple(name for name in written if name in carried)
    before: Sequence[Segment] = ()
    behind: Sequence[Segment] = ()
    if last_beginning(structure.segments) > 0:  # a cascade
        # Other models run on GPUs too, whose engines pass float32 tensors to the next stage.
        before = structure.segments[max(first - 1, 0) : first]
        behind = structure.segments[last + 1 : last + 2] if given and not final else ()
    inner = slice(len(before), len(before) + len(segments))
    around, outputs = (*before, *segments, *behind), (answer,) if answer else given
    return StageSpec(
        index=index,
        first_segment=first,
        last_segment=last,
        exit=exit_index,
        load=StageGraph(partial(assemble_stage, around, exit_, outputs, inner), read),
        inputs=_stage_inputs(segments, exit_),
        carried=carried,
        given=given,
        answer=exit_.output if exit_ else answer,
        confidence=exit_.confidence if exit_ else None,
        form=structure.answer.form,
        task=structure.answer.task,
        criterion=structure.answer.criterion if exit_ else PROBABILITY,
        threshold=threshold,
    )


def carried_over(structure: ModelStructure, segment: int, then: int) -> tuple[str, ...]:
    """Return the tensors that are needed after a segment, if segment ``then`` runs next.

    These are cut tensors and graph inputs that later segments read. There are no cut tensors if
    ``then`` starts from the model's inputs.
    """
    readers = [s.inputs for s in structure.segments[then:]]
    readers += [e.inputs for e in structure.exits if e.after_segment >= then]
    read = dict.fromkeys(name for inputs in readers for name in inputs)
    graph_inputs = {tensor.name for tensor in structure.inputs}
    written = [name for s in structure.segments[: segment + 1] for name in s.outputs]
    cuts = [name for name in written if name in read]
    return (*cuts, *(name for name in read if name in graph_inputs))


def _stage_inputs(segments: Sequence[Segment], exit_: Exit | None) -> tuple[str, ...]:
    inside = {name for segment in segments for name in segment.outputs}
    read = [name for segment in segments for name in segment.inputs]
    read += exit_.inputs if exit_ else ()
    return tuple(dict.fromkeys(name for name in read if name not in inside))
