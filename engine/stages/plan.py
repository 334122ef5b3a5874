"""Plans: the stages that a model is executed in under a policy.

A stage is what runs between two neighbouring active exits: the segments of that span as one
graph, with the exit fused in (:mod:`.graphs.assembly`). In a cascade the source model is the
last segment, and begins anew: a stage that ends with its answer is that segment alone, and what of
the quantised model lies between the last exit and it does not run.
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
    """The serving modes: what happens to a sample that is sure enough at an exit."""

    LEAVE = "leave"
    """It leaves the batch, and its further compute is saved (PAME, E3)."""
    AUDIT = "audit"
    """It leaves, except with a known probability: then it runs on after its answer, so that
    agreement is measured while nearly all the compute is saved."""
    RELEASE = "release"
    """Its answer is sent at once, and it always runs on (Apparate)."""
    OFF = "off"
    """Nothing exits: the unmodified model as one graph."""

    @property
    def observed(self) -> bool:
        """Whether answers are compared with the unmodified model's while serving."""
        return self in (Mode.AUDIT, Mode.RELEASE)


class LightGraph(NamedTuple):
    """A graph that may name weights in a file instead of holding them."""

    model: bytes
    weights: Path | None
    """The folder of that file; ``None`` where it names none."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """How a stage's graph is made of the files of a bundle; called, it gives the graph."""

    make: Callable[[ReadPart], bytes]
    read: ReadPart

    def __call__(self) -> bytes:
        """Make it of files as they are read."""
        return self.make(self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, ready to be prepared by a backend."""

    index: int
    first_segment: int
    last_segment: int
    exit: int | None
    """Index into ``Manifest.exits`` of the exit that the stage ends with; ``MODEL_END`` where it
    ends with the model's own answer, ``None`` where it gives no answer at all."""
    load: Callable[[], bytes]
    """Gives the stage's ONNX graph; called by the backend when it prepares the stage. A
    :class:`StageGraph`, if it is made of a bundle's files and of nothing else."""
    inputs: tuple[str, ...]
    """Tensors that the graph reads."""
    carried: tuple[str, ...]
    """Tensors that later stages read: cut tensors first, then graph inputs that pass through. Where
    the next stage begins anew, these alone."""
    given: tuple[str, ...] = ()
    """Those of ``carried`` that the graph gives; others pass through."""
    answer: str | None
    """Name of the answer among the graph's outputs, if it gives one."""
    confidence: str | None = None
    """Name of the answer's confidence there; where there is none, the backend computes it."""
    form: AnswerForm
    task: AnswerTask = CLASSIFICATION
    criterion: Criterion = PROBABILITY
    """What says how sure the answer is, where that is not in ``confidence``: on the host."""
    threshold: float
    """Least confidence to leave with, a float32 value (the policy's rounded up, so that none
    leaves below it); 0 in the last stage, where everything leaves."""
    unmodified: bool = False
    """Whether the graph is the source model's own."""
    weight_form: WeightForm = WeightForm.PACKED
    """How the stage has its weights in memory, where the backend maps them from the bundle."""
    bundle: Bundle | None = field(default=None, compare=False, repr=False)
    """The stage's bundle, for backends that have more in one than graphs; ``None`` while there is
    none yet."""

    def load_light(self) -> LightGraph:
        """Give the stage's graph without the weights that the bundle has in a file.

        A runtime that maps them from there holds them once for all graphs. Errors as of
        ``load``, which gives the same graph with all of its weights.
        """
        bundle, graph = self.bundle, self.load
        if bundle is not None and isinstance(graph, StageGraph):
            folder = bundle.weight_folder()
            if folder is not None and is_text(folder):
                return LightGraph(graph.make(bundle.graph), folder)
        return LightGraph(graph(), None)

    @property
    def final(self) -> bool:
        """Whether the model's own answer is given here."""
        return not self.carried

    @property
    def answered_by(self) -> int:
        """The exit, or ``MODEL_END``, that gives the stage's answer, where there is one."""
        assert self.exit is not None, f"stage {self.index} gives no answer"
        return self.exit

    @property
    def unit(self) -> tuple[int, int, int | None]:
        """First and last segment, and the exit fused in, if any: what the graph is made of.

        In a cascade the graphs of one unit may differ in whether they give the cut tensor.
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
        """The segments, in order."""

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
    """``exit 3`` or ``final``: how an exit, or the model's end, is named in metrics and reports."""
    return "final" if exit_index == MODEL_END else f"exit {exit_index}"


def make_plan(
    bundle: Bundle,
    policy: ExitPolicy | None = None,
    mode: Mode = Mode.LEAVE,
    *,
    borders: Collection[int] = (),
) -> Plan:
    """Plan the stages between the active exits of ``policy`` (default: the bundle's own).

    Where the model is split among devices, a stage ends behind each segment of ``borders`` too; in
    mode off nothing is split.
    """
    policy = bundle.policy if policy is None else policy
    if mode is Mode.OFF:
        return Plan(stages=(source_stage(bundle),), policy_version=policy.version, mode=mode)
    # Where answers are observed, exits that answer nothing run in shadow mode.
    active = [a for a in policy.active if a.threshold < NEVER or mode.observed]
    if bundle.number and (not active or active[-1].exit != bundle.manifest.exits[-1].index):
        # What a subnet's exits are not sure of ends at its own answer, sure or not.
        active.append(ActiveExit(exit=bundle.manifest.exits[-1].index, threshold=NEVER))
    stages = _of(bundle, plan_stages(bundle.manifest, bundle.read, active, borders))
    return Plan(stages=stages, policy_version=policy.version, mode=mode)


def plan_stages(
    structure: ModelStructure,
    read: ReadPart,
    active: Sequence[ActiveExit],
    borders: Collection[int] = (),
) -> tuple[StageSpec, ...]:
    """Plan the stages between exits, in depth order; ``read`` gives a part's file.

    Where an exit's decision depends on earlier ones, all up to the last of ``active`` run. Behind
    segments of ``borders`` where none of these is, stages end without an answer; but not in what of
    a cascade's copy lies behind its last exit, and does not run.
    """
    if structure.answer.criterion.depends_on_earlier and active:
        active = all_up_to(active)
    ends: list[tuple[int, int | None, float]] = [
        (structure.exits[a.exit].after_segment, a.exit, a.threshold) for a in active
    ]
    last, exits_end = len(structure.segments) - 1, {end for end, _, _ in ends}
    if last_beginning(structure.segments) > 0:  # only the copy in front has borders inside
        last_exit = max(exits_end, default=0)
        borders = [border for border in borders if border < last_exit]
    ends += [(b, None, NEVER) for b in set(borders) - exits_end if 0 <= b < last]
    ends.sort(key=itemgetter(0))
    return tuple(_stages(structure, read, [*ends, (last, MODEL_END, 0.0)]))


def all_up_to(active: Sequence[ActiveExit]) -> tuple[ActiveExit, ...]:
    """Add all exits before the last one that are not there, at ``NEVER``."""
    thresholds = {a.exit: a.threshold for a in active}
    exits = range(max(thresholds) + 1)
    return tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in exits)


def make_chained_plan(bundle: Bundle) -> Plan:
    """Plan every segment of the source model as a stage of its own, without exits.

    The same answers as one graph gives, up to the rounding of sums in another order, at the price
    of every border. In a cascade the source model is one segment.
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
    """Plan the stage of segments ``first`` to ``last`` that ends with an exit, or the model's end.

    ``carried`` are the tensors that what follows reads: what of it segments give, the graph gives.
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
        # Others run on GPUs too, whose engines have float32 borders.
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
    """Tensors alive after a segment, if segment ``then`` is the next that runs.

    Cut tensors and graph inputs that what follows reads: of the former there are none where
    ``then`` begins anew.
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
