"""``eecompile --train joint``: a copy of the model that learned together with its exits (PAME 5.2).

The frozen model with its exits is trained once more, backbone included. The promise stays about the
original model: what was trained stands as a copy before it, a cascade (:mod:`.cascade`), whose own
answer is the last exit. So the original answers who is sure enough nowhere, and audited samples,
and the certificate is about it. It is used where more is predicted to be saved than with the exits
of the frozen model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final

import onnx

from offramp.calibration.torch.joint_training import JointModel, JointOptions, train_jointly
from offramp.compiler.blueprints.blueprint import Blueprint, CompileRun, draw, measure_copy
from offramp.compiler.blueprints.cascade import PREFIX, slice_twin
from offramp.compiler.blueprints.joint_folder import JointFolder
from offramp.compiler.blueprints.own_answer import own_exit
from offramp.compiler.blueprints.precision import LEAST_GAIN
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import exit_prefix
from offramp.compiler.exits.exits import BuiltExit, FoundExits
from offramp.compiler.graphs.graph import hoisted, rename_graph, serialised
from offramp.compiler.graphs.tail import giving
from offramp.engine.common.environment import available_cores
from offramp.engine.graphs.assembly import assemble

_log = logging.getLogger(__name__)

TRAINED_EXITS: Final = 6
"""Exits that learn together, at most: many make training unstable (PAME 5.2), and each takes
time. Those that net most with the frozen model, whether that is anything or not."""


def choose_training(
    plain: Blueprint, found: FoundExits, run: CompileRun, folder: JointFolder
) -> Blueprint:
    """Train a copy with its exits, and give what is predicted to save more: that, or ``plain``.

    A warning says so if it is ``plain``. ``folder`` keeps what was trained so far.

    Raises:
        UntrainableError: The model or an exit has an operator that cannot be trained.
        CompileError: The trained copy's pieces differ from it.
        DataError: The model fails on a sample.
    """
    exits = sorted(found.built, key=attrgetter("best.net_savings"), reverse=True)[:TRAINED_EXITS]
    exits.sort(key=attrgetter("candidate"))
    if not exits:
        return _without(plain, "there is no place for an exit")
    model, options = plain.sliced.whole_model(), run.options
    source, taught = serialised(hoisted(model.proto)), model.taught
    prefixes = ["", *(exit_prefix(e.candidate) for e in exits)]
    own, *scores = [prefix + taught.output for prefix in prefixes]
    every = [*scores, own]
    parts = [source, *(e.graph for e in exits)]
    parts = [giving(part, name) for part, name in zip(parts, [own, *scores], strict=True)]
    joined = assemble(parts, every)
    del model
    training = JointOptions(
        teacher=options.teach,
        epochs=options.training.epochs,
        learning_rate=options.joint_rate,
        threads=available_cores(),
        seed=options.seed,
    )
    title = f"Train the model with {len(exits)} exits"
    with run.progress.step(title, training.epochs * len(run.parts.train)) as advance:
        trained = train_jointly(
            JointModel(proto=onnx.ModelProto.FromString(joined), scores=tuple(every)),
            giving(source, own),
            taught,
            train=run.parts.train,
            tune=run.parts.tune,
            options=training,
            state=folder.state(joined),
            progress=advance,
        )
    if not trained.training.kept:
        return _without(plain, "no epoch made the loss on the tuning split smaller")
    weights = {tensor.name: tensor for tensor in trained.proto.graph.initializer}
    copy = _with_weights(source, weights)
    learned = [replace(e, graph=_with_weights(e.graph, weights)) for e in exits]
    joint = _drawn(plain, learned, copy, run)
    told = f"the model trained with its exits {trained.training.describe()}"
    compared = (
        f"exits of the frozen model are predicted to save {plain.predicted_savings:.1%} of its "
        f"time, {told}, {joint.predicted_savings:.1%}"
    )
    if joint.predicted_savings < plain.predicted_savings + LEAST_GAIN:
        return _without(plain, compared)
    _log.info("Joint training: %s.", compared)
    return replace(joint, reason=compared, training=trained.training, frozen=plain)


def _without(plain: Blueprint, reason: str) -> Blueprint:
    nothing = "JOINT TRAINING BRINGS NOTHING HERE, the bundle has exits of the frozen model: %s."
    _log.warning(nothing, reason)
    return replace(plain, reason=reason)


def _drawn(plain: Blueprint, exits: Sequence[BuiltExit], copy: bytes, run: CompileRun) -> Blueprint:
    """Put the trained copy before the model, with the exits that learned with it."""
    sliced = slice_twin(plain.sliced, copy).without_weights()
    timer, times = measure_copy(sliced, copy, run)
    moved = [_moved(sliced, exit_) for exit_ in exits]
    return draw(
        sliced, [*moved, own_exit(sliced, times, plain, run)], run, timer=timer, times=times
    )


def _moved(sliced: Sliced, exit_: BuiltExit) -> BuiltExit:
    """Let an exit read what the copy gives."""
    given = {name for segment in sliced.segments[:-1] for name in segment.outputs}

    def renamed(name: str) -> str:
        return PREFIX + name if PREFIX + name in given else name

    proto = onnx.ModelProto.FromString(exit_.graph)
    rename_graph(proto.graph, renamed)
    return replace(
        exit_,
        cut=sliced.cuts[exit_.candidate],
        graph=proto.SerializeToString(),
        reads=tuple(map(renamed, exit_.reads)),
    )


def _with_weights(graph: bytes, weights: dict[str, onnx.TensorProto]) -> bytes:
    proto = onnx.ModelProto.FromString(graph)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(weights.get(tensor.name, tensor))
    return proto.SerializeToString()
