"""From a bundle and a policy to the stages that are executed.

A stage is what runs between two neighbouring active exits: the segments of that span as one
graph, with the exit fused in (:mod:`offramp.engine.assembly`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from offramp.bundle import AnswerForm, Bundle, ExitPolicy, Manifest
from offramp.bundle.policy import NEVER
from offramp.engine.assembly import assemble
from offramp.engine.control.agreement import float32_at_least


class Mode(StrEnum):
    """What happens to a sample that is sure enough at an exit."""

    LEAVE = "leave"
    """It leaves the batch, and its further compute is saved (PAME, E3)."""
    OFF = "off"
    """Nothing exits: the unmodified model as one graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage, ready to be prepared by a backend."""

    index: int
    """Position in the plan."""
    first_segment: int
    last_segment: int
    exit: int | None
    """Index into ``Manifest.exits``; ``None`` where the stage ends without an exit, or with
    the model's own answer."""
    load: Callable[[], bytes]
    """Gives the stage's ONNX graph; called by the backend when it prepares the stage."""
    inputs: tuple[str, ...]
    """Tensors that the graph reads."""
    carried: tuple[str, ...]
    """Tensors that later stages read: its cut tensor, and graph inputs that pass through."""
    answer: str | None
    """Name of the answer among the graph's outputs, if it gives one."""
    form: AnswerForm
    threshold: float
    """Least confidence to leave with, a float32 value (the policy's rounded up, so that none
    leaves below it); 0 in the last stage, where everything leaves."""

    @property
    def final(self) -> bool:
        """Whether the model's own answer is given here."""
        return not self.carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages of a model under a policy."""

    stages: tuple[StageSpec, ...]
    policy_version: int
    mode: Mode

    def exit_labels(self) -> tuple[str, ...]:
        """Names of the places where an answer can come from, in depth order."""
        return tuple(exit_label(stage.exit) for stage in self.stages)


def exit_label(exit_index: int | None) -> str:
    """``exit 3`` or ``final``: how an exit is named in metrics and reports."""
    return "final" if exit_index is None else f"exit {exit_index}"


def make_plan(bundle: Bundle, policy: ExitPolicy | None = None, mode: Mode = Mode.LEAVE) -> Plan:
    """Plan the stages between the active exits of ``policy`` (default: the bundle's own)."""
    policy = bundle.policy if policy is None else policy
    if mode is Mode.OFF:
        return Plan(stages=(_source_stage(bundle),), policy_version=policy.version, mode=mode)
    active = [a for a in policy.active if a.threshold < NEVER]
    ends = [(bundle.manifest.exits[a.exit].after_segment, a.exit, a.threshold) for a in active]
    last = len(bundle.manifest.segments) - 1
    stages = _stages(bundle, [*ends, (last, None, 0.0)])
    return Plan(stages=tuple(stages), policy_version=policy.version, mode=mode)


def make_chained_plan(bundle: Bundle) -> Plan:
    """Plan every segment as a stage of its own, without exits.

    The same answers as one graph gives, up to the rounding of sums in another order, at the
    price of every border.
    """
    ends = [(segment.index, None, NEVER) for segment in bundle.manifest.segments]
    return Plan(stages=tuple(_stages(bundle, ends)), policy_version=0, mode=Mode.OFF)


def _source_stage(bundle: Bundle) -> StageSpec:
    manifest = bundle.manifest
    return StageSpec(
        index=0,
        first_segment=0,
        last_segment=len(manifest.segments) - 1,
        exit=None,
        load=lambda: bundle.read(manifest.source.file),
        inputs=tuple(tensor.name for tensor in manifest.inputs),
        carried=(),
        answer=manifest.answer.output,
        form=manifest.answer.form,
        threshold=0.0,
    )


def _stages(bundle: Bundle, ends: Sequence[tuple[int, int | None, float]]) -> Iterator[StageSpec]:
    manifest = bundle.manifest
    first = 0
    for index, (last, exit_index, threshold) in enumerate(ends):
        final = last == len(manifest.segments) - 1
        carried = () if final else carried_after(manifest, last)
        answer = None
        if final:
            answer = manifest.answer.output
        elif exit_index is not None:
            answer = manifest.exits[exit_index].output
        yield StageSpec(
            index=index,
            first_segment=first,
            last_segment=last,
            exit=exit_index,
            load=_loader(bundle, first, last, exit_index),
            inputs=_stage_inputs(manifest, first, last, exit_index),
            carried=carried,
            answer=answer,
            form=manifest.answer.form,
            threshold=0.0 if final else float(float32_at_least(np.array(threshold))),
        )
        first = last + 1


def carried_after(manifest: Manifest, segment: int) -> tuple[str, ...]:
    """Tensors alive after a segment: its cut tensor, then graph inputs read by what follows."""
    graph_inputs = {tensor.name for tensor in manifest.inputs}
    later: dict[str, None] = {manifest.segments[segment].output: None}
    for follower in manifest.segments[segment + 1 :]:
        later.update((name, None) for name in follower.inputs if name in graph_inputs)
    for exit_ in manifest.exits:
        if exit_.after_segment > segment:
            later.update((name, None) for name in exit_.inputs if name in graph_inputs)
    return tuple(later)


def _stage_inputs(
    manifest: Manifest, first: int, last: int, exit_index: int | None
) -> tuple[str, ...]:
    inside = {segment.output for segment in manifest.segments[first : last + 1]}
    names: dict[str, None] = {}
    for segment in manifest.segments[first : last + 1]:
        names.update((name, None) for name in segment.inputs if name not in inside)
    if exit_index is not None:
        exit_inputs = manifest.exits[exit_index].inputs
        names.update((name, None) for name in exit_inputs if name not in inside)
    return tuple(names)


def _loader(bundle: Bundle, first: int, last: int, exit_index: int | None) -> Callable[[], bytes]:
    manifest = bundle.manifest

    def load() -> bytes:
        parts = [bundle.read(segment.file) for segment in manifest.segments[first : last + 1]]
        outputs = [manifest.segments[last].output]
        if exit_index is not None:
            parts.append(bundle.read(manifest.exits[exit_index].file))
            outputs.insert(0, manifest.exits[exit_index].output)
        return assemble(parts, outputs)

    return load
