"""``eecompile --train joint``: train a copy of the model together with its exits (PAME 5.2).

The frozen model with its exits is trained once more, backbone included. The promise is still about
the original model. The trained copy is put in front of it as a cascade (:mod:`.cascade`), with the
copy's own answer as the last exit. So the original model answers samples that no exit is sure of,
and audited samples, and the certificate is about the original. The copy is used if it is predicted
to save more time than exits on the frozen model.

Training a whole model takes long, so a folder next to the future bundle keeps intermediate results.
An interrupted run continues after the last completed epoch. It keeps the exits: they were chosen by
measured times, and would differ if they were chosen again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import onnx

from offramp.bundle import BundleError
from offramp.bundle.files import MAX_JSON_BYTES, parse_json, read_limited
from offramp.bundle.schema.parts import HeadScore
from offramp.bundle.schema.serde import from_plain, to_plain
from offramp.calibration.torch.joint_training import (
    JointModel,
    JointOptions,
    JointState,
    train_jointly,
)
from offramp.compiler.blueprints.blueprint import Blueprint, draw, own_exit, time_copy
from offramp.compiler.blueprints.cascade import PREFIX, slice_twin
from offramp.compiler.blueprints.precision_choice import LEAST_GAIN
from offramp.compiler.common.errors import CompileError
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import exit_prefix
from offramp.compiler.exits.exits import BuiltExit, FoundExits
from offramp.compiler.exits.timed_model import TimedModel
from offramp.compiler.graphs.graph import hoisted, rename_graph, serialised
from offramp.compiler.graphs.tail import giving
from offramp.engine.common.environment import available_cores, package_version
from offramp.engine.graphs.assembly import assemble

_log = logging.getLogger(__name__)

TRAINED_EXITS: Final = 6
"""Largest number of exits trained together: many exits make training unstable (PAME 5.2), and each
takes time. The exits trained are those with the largest net savings on the frozen model, even if
these are negative."""


def choose_training(plain: Blueprint, found: FoundExits, folder: JointFolder) -> Blueprint:
    """Train a copy with its exits, and return the blueprint with larger predicted savings.

    The result is the copy's blueprint or ``plain``, the source model's; for ``plain`` a warning is
    logged. ``folder`` keeps intermediate results.

    Raises:
        UntrainableError: The model or an exit has an operator that cannot be trained.
        CompileError: The trained copy's pieces differ from it.
        DataError: The model fails on a sample.
    """
    exits = sorted(found.built, key=attrgetter("best.net_savings"), reverse=True)[:TRAINED_EXITS]
    exits.sort(key=attrgetter("candidate"))
    if not exits:
        return _without(plain, "there is no place for an exit")
    model, run = plain.sliced.whole_model(), plain.timed.run
    options = run.options
    source, taught = serialised(hoisted(model.proto)), model.taught
    prefixes = ["", *(exit_prefix(e.candidate) for e in exits)]
    own, *scores = [prefix + taught.output for prefix in prefixes]
    every = [*scores, own]
    parts = [source, *(e.graph for e in exits)]
    parts = [giving(part, name) for part, name in zip(parts, [own, *scores], strict=True)]
    joined = assemble(parts, every)
    del model
    training = JointOptions(
        teacher=options.copy.teach,
        epochs=options.building.training.epochs,
        learning_rate=options.copy.joint_rate,
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
    joint = _drawn(plain, learned, copy)
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


def _drawn(plain: Blueprint, exits: Sequence[BuiltExit], copy: bytes) -> Blueprint:
    """Put the trained copy in front of the model, with the exits that were trained with it."""
    sliced = slice_twin(plain.sliced, copy).without_weights()
    timed = time_copy(sliced, copy, plain.timed.run)
    return draw(timed, [*(_moved(sliced, exit_) for exit_ in exits), own_exit(timed, plain)])


def _moved(sliced: Sliced, exit_: BuiltExit) -> BuiltExit:
    """Return an exit of the source model, changed to read the copy's tensors."""
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


_PLACES: Final = {"model", "data", "output", "overwrite", "scratch", "scratch_limit"}
"""Options that do not affect training."""
_EXITS: Final = "exits.json"
_STATE: Final = "weights.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointFolder:
    """Folder ``model.ee.training``: exits and weights of an unfinished run."""

    path: Path
    digest: str
    """Hash of model, data, options and versions."""

    @classmethod
    def of(cls, timed: TimedModel) -> JointFolder:
        """Return the folder of a run; nothing is written yet.

        CompileError if the path holds anything else, which must not be replaced.
        """
        sliced, options, parts = timed.sliced, timed.run.options, timed.run.parts
        plain = dataclasses.asdict(replace(options, data=Path()))
        del plain["threads"], plain["building"]["training"]["threads"]  # they do not affect weights
        nodes = [(node.op_type, list(node.output)) for node in sliced.model.proto.graph.node]
        said = {
            "model": sliced.model.original_sha256,
            "nodes": nodes,  # simplification may stop early
            "cuts": [[tensor.name for tensor in cut.tensors] for cut in sliced.cuts],
            "data": parts.train.sha256,
            "samples": [len(parts.train), len(parts.tune), len(parts.certify)],
            "options": {k: v for k, v in plain.items() if k not in _PLACES},
            "versions": [package_version(name) for name in ("offramp", "torch", "onnxruntime")],
        }
        text = json.dumps(said, sort_keys=True, default=str)
        path = options.output.with_name(options.output.name + ".training")
        if path.exists() and not (path / _EXITS).is_file():
            raise CompileError(
                f"{path} exists, and is not the folder of an interrupted training; --train joint "
                "keeps its state there: move it, or name another --output"
            )
        return cls(path=path, digest=hashlib.sha256(text.encode()).hexdigest())

    def exits(self, sliced: Sliced) -> FoundExits | None:
        """Read the exits that an earlier run found; ``None`` without a matching run."""
        try:
            plain = parse_json(read_limited(self.path / _EXITS, MAX_JSON_BYTES), _EXITS)
            if plain["digest"] != self.digest:
                _log.warning("%s belongs to another compilation: it is replaced.", self.path)
                return None
            built = [self._read(sliced, item) for item in plain["built"]]
            best = tuple(from_plain(HeadScore, score, _EXITS) for score in plain["best"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, IndexError, BundleError) as error:
            _log.warning("%s cannot be read (%s): it is replaced.", self.path, error)
            return None
        _log.warning("An earlier run was interrupted: going on from %s.", self.path)
        return FoundExits(built=tuple(built), best=best)

    def keep(self, found: FoundExits) -> None:
        """Write the exits; OSError if writing fails."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for number, exit_ in enumerate(found.built):
            (self.path / f"{number:02d}.onnx").write_bytes(exit_.graph)
        plain = {
            "digest": self.digest,
            "built": [_described(number, exit_) for number, exit_ in enumerate(found.built)],
            "best": to_plain(found.best),
        }
        # written last: a folder without this file is incomplete
        (self.path / _EXITS).write_text(json.dumps(plain))

    def state(self, joined: bytes) -> JointState:
        """Return the file that keeps the weights of a joint graph while it is trained."""
        digest = hashlib.sha256(self.digest.encode() + hashlib.sha256(joined).digest())
        return JointState(path=self.path / _STATE, digest=digest.hexdigest())

    def remove(self) -> None:
        """Remove the folder, once the bundle is written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _read(self, sliced: Sliced, item: dict[str, Any]) -> BuiltExit:
        heads = tuple(from_plain(HeadScore, score, _EXITS) for score in item["heads"])
        return BuiltExit(
            candidate=item["candidate"],
            cut=sliced.cuts[item["candidate"]],
            graph=(self.path / item["file"]).read_bytes(),
            reads=tuple(item["reads"]),
            weights={},
            heads=heads,
            best=from_plain(HeadScore, item["best"], _EXITS),
            share=item["share"],
            certainty=tuple(item["certainty"]),
        )


def _described(number: int, exit_: BuiltExit) -> dict[str, Any]:
    return {
        "candidate": exit_.candidate,
        "file": f"{number:02d}.onnx",
        "reads": list(exit_.reads),
        "heads": to_plain(exit_.heads),
        "best": to_plain(exit_.best),
        "share": exit_.share,
        "certainty": list(exit_.certainty),
    }
