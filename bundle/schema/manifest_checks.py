"""What must hold of a manifest beyond each of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from offramp.bundle.schema.joint_training import JointTraining
    from offramp.bundle.schema.manifest import Answer, Calibration, Manifest, TensorSpec
    from offramp.bundle.schema.parts import Segment

MOST_SAMPLE_BYTES: Final = 2**30
"""Of a sample's input: more is no sample, but a way to exhaust memory."""
_NAMED: Final = 4
"""Tensors that a message names at most."""


def check_unique(what: str, names: Iterable[str]) -> None:
    """No name occurs twice; ``what`` says what they are names of."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r:.100} is there twice")
        seen.add(name)


def check_places(manifest: Manifest) -> None:
    """Inputs that nothing reads have places of their own among all inputs, which rise."""
    places = [each.place for each in manifest.unread]
    end = len(manifest.inputs) + len(places)
    if places != sorted(set(places)) or any(not 0 <= place < end for place in places):
        raise ValueError(f"unread: places {places!s:.100} must rise, from 0 to {end - 1}")


def check_answer(manifest: Manifest) -> None:
    """The answer is the one output, of the shape and type that its task has."""
    answer, outputs = manifest.answer, manifest.outputs
    if [output.name for output in outputs] != [answer.output]:
        raise ValueError(
            f"outputs: {[output.name for output in outputs]!s:.100} are not the answer "
            f"{answer.output!r} alone"
        )
    (output,) = outputs
    if answer.task.kind == "other":
        if not (output.shape and isinstance(output.shape[0], str)):
            raise ValueError(f"outputs: {output.describe()} does not begin with the batch")
        return
    expected = shape_of(answer)
    fits = (
        len(output.shape) == len(expected)
        and isinstance(output.shape[0], str)
        and all(e is None or s == e for s, e in zip(output.shape[1:], expected[1:], strict=True))
    )
    is_number = output.dtype[0] in ("iu" if answer.form == "classes" else "f")
    if not (fits and is_number):
        sizes = ", ".join(str(e or "…") for e in expected[1:])
        kind = "integer" if answer.form == "classes" else "floating-point"
        raise ValueError(f"outputs: {output.describe()} is not {kind} [batch, {sizes}]")
    mask = answer.task.mask
    if mask is None:
        return
    shapes = {tensor.name: tensor.shape for tensor in manifest.inputs}
    if mask not in shapes or len(shapes[mask]) != 2 or shapes[mask][1] != output.shape[1]:
        raise ValueError(
            f"answer.task.mask: {mask!r:.100} is no input [batch, {output.shape[1]}], which says "
            "which tokens of the answer count"
        )


def shape_of(answer: Answer) -> tuple[int | None, ...]:
    """List the sizes of a model's answer, as far as its task fixes them; first the batch."""
    classes = () if answer.form == "classes" else (answer.classes,)
    match answer.task.kind:
        case "token-classification":
            return (None, None, *classes)
        case "segmentation":
            return (None, *classes, None, None)
        case "pose":
            return (None, answer.classes, None, None)
        case _:
            return (None, answer.classes)


def check_plain(manifest: Manifest) -> None:
    """Exits shrink batches and imitate answers: without them alone may that be impossible."""
    if not manifest.exits:
        return
    if manifest.no_batching:
        raise ValueError(
            f"no_batching: {manifest.no_batching!r:.100}, and there are exits, expected none"
        )
    if manifest.answer.task.kind == "other":
        raise ValueError("answer.task: kind 'other' is for models without exits")


def check_samples(inputs: Sequence[TensorSpec], calibration: Calibration) -> None:
    """There is a shape of a sample for each input, which the input takes."""
    shapes = calibration.sample_shapes
    names = sorted(tensor.name for tensor in inputs)
    if not names or sorted(shapes) != names:
        raise ValueError(
            f"calibration.sample_shapes: has {sorted(shapes)!s:.100}, expected the inputs {names}"
        )
    for tensor in inputs:
        shape, (batch, *sizes) = shapes[tensor.name], tensor.shape or (None,)
        fits = len(shape) == len(sizes) and all(
            found >= 1 if isinstance(size, str) else found == size
            for found, size in zip(shape, sizes, strict=True)
        )
        if not isinstance(batch, str) or not fits:
            raise ValueError(
                f"calibration.sample_shapes: {list(shape)!s:.100} is no sample of the input "
                f"{tensor.describe()}"
            )
        if prod(shape) * np.dtype(tensor.dtype).itemsize > MOST_SAMPLE_BYTES:
            raise ValueError(f"calibration.sample_shapes: {list(shape)!s:.100} is above 1 GiB")


def check_precision(manifest: Manifest) -> None:
    """The last segment and the last exit of a cascade, and of no other, are what they must be."""
    last = len(manifest.segments) - 1
    own = [e.index for e in manifest.exits if e.head.kind == "own"]
    if manifest.training is not None and manifest.precision != "fp32":
        raise ValueError(f"training: is for precision fp32, not for {manifest.precision}")
    if not manifest.is_cascade:
        if own:
            raise ValueError(f"exits[{own[0]}]: head 'own' is for precision int8, not for fp32")
        return
    what = _copy_of(manifest)
    if not last:
        raise ValueError(f"segments: {what} needs one of the copy, and the source model")
    if manifest.segments[last].file != manifest.source.file:
        raise ValueError(
            f"segments[{last}]: file {manifest.segments[last].file!r:.100}, expected the source "
            f"model {manifest.source.file!r:.100}, which {what} ends with"
        )
    end = len(manifest.exits) - 1
    if own != [end] or manifest.exits[end].after_segment != last - 1:
        raise ValueError(
            f"exits: {what} needs the copy's own answer, head 'own', as the last exit, after "
            f"segment {last - 1}; found {own} of {len(manifest.exits)}"
        )
    if manifest.training is not None:
        _check_trained(manifest.training, len(manifest.exits))


def _copy_of(manifest: Manifest) -> str:
    """Name what makes a manifest a cascade."""
    if manifest.subnet:
        return f"subnet {manifest.subnet!r:.100}"
    return f"precision {manifest.precision}" if manifest.training is None else "joint training"


def _check_trained(training: JointTraining, exits: int) -> None:
    for epoch in training.epochs:
        if len(epoch.losses) != exits:
            raise ValueError(
                f"training: {len(epoch.losses)} answers were judged, expected one for each of the "
                f"{exits} exits"
            )


def check_variants(manifest: Manifest) -> None:
    """Each variant is whole by itself, and its files lie in its own folder."""
    if [variant.index for variant in manifest.variants] != [*range(1, len(manifest.variants) + 1)]:
        raise ValueError("variants: indices must count from 1 in order")
    check_unique("variants", (variant.name for variant in manifest.variants))
    for variant in manifest.variants:
        where = f"variants[{variant.index - 1}]"
        files = [s.file for s in variant.segments[:-1]] + [e.file for e in variant.exits]
        for file in files:
            if not file.startswith(variant.folder):
                raise ValueError(f"{where}: file {file!r:.100} is not under {variant.folder}")
        check_unique(f"{where}.files", files)
        try:
            manifest.of_variant(variant.index)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def check_sharing(manifest: Manifest) -> None:
    """What sharing weights costs is said of the model and of each variant, or of none."""
    said = [cost.variant for cost in manifest.weight_sharing]
    if said and said != [*range(len(manifest.variants) + 1)]:
        raise ValueError(
            f"weight_sharing: of variants {said!s:.100}, expected one for each from 0 to "
            f"{len(manifest.variants)}, in order"
        )


def check_sizes(segments: Sequence[Segment]) -> None:
    """Sizes are said of every segment, or of none; behind the last there is no border."""
    said = {size is not None for s in segments for size in (s.row_bytes, s.weight_bytes)}
    if len(said) > 1:
        raise ValueError(
            "segments: some lack row_bytes or weight_bytes, expected both of all, or of none"
        )
    if last := segments[-1].row_bytes:
        raise ValueError(f"segments: row_bytes {last} behind the last, expected 0")


def check_chain(manifest: Manifest) -> None:
    """Each segment reads what those before it give, and graph inputs; exits do likewise.

    What a segment gives is read by others, but by exits alone where the source model is next: in a
    cascade it reads graph inputs.
    """
    graph_inputs = {tensor.name for tensor in manifest.inputs}
    anew = len(manifest.segments) - 1 if manifest.is_cascade else 0
    alive: list[tuple[str, ...]] = []
    """By segment, the cut tensors that are there when it begins."""
    given: tuple[str, ...] = ()
    for segment in manifest.segments:
        if segment.index == anew:
            given = ()
        alive.append(given)
        _check_reads(f"segments[{segment.index}]", segment.inputs, given, graph_inputs)
        given = (*given, *segment.outputs)
    for exit_ in manifest.exits:
        behind = exit_.after_segment
        given = (*alive[behind], *manifest.segments[behind].outputs)
        _check_reads(f"exits[{exit_.index}]", exit_.inputs, given, graph_inputs)
    read = {name for segment in manifest.segments for name in segment.inputs}
    for before, after in pairwise(manifest.segments):
        unread = [name for name in before.outputs if name not in read]
        if unread and after.index != anew:
            _refuse_reads(f"segments[{after.index}]", after.inputs, unread)
    written = [name for segment in manifest.segments for name in segment.outputs]
    written += [name for exit_ in manifest.exits for name in (exit_.output, exit_.confidence)]
    check_unique("tensors", [*(tensor.name for tensor in manifest.declared), *written])


def _check_reads(
    what: str, read: Sequence[str], given: Sequence[str], graph_inputs: set[str]
) -> None:
    if set(read) - graph_inputs - set(given) or not read:
        _refuse_reads(what, read, given)
    check_unique(f"{what}.inputs", read)


def _refuse_reads(what: str, read: Sequence[str], given: Sequence[str]) -> None:
    cuts = " or ".join(map(repr, given[-_NAMED:]))
    expected = f"{cuts:.100}, and graph inputs beside it" if given else "graph inputs"
    raise ValueError(f"{what}: reads {list(read)!s:.200}, expected {expected}")
