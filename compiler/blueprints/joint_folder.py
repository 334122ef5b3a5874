"""The folder beside a bundle-to-be that keeps what joint training has so far, until it is written.

Training a whole model takes long, and a run that was interrupted goes on where it was: with the
same exits, which were found by times that another run would measure otherwise, and after the last
epoch that was completed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.bundle import BundleError
from offramp.bundle.files import MAX_JSON_BYTES, parse_json, read_limited
from offramp.bundle.schema.parts import HeadScore
from offramp.bundle.schema.serde import from_plain, to_plain
from offramp.calibration.torch.joint_state import JointState
from offramp.compiler.blueprints.blueprint import CompileRun
from offramp.compiler.common.errors import CompileError
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.exits import BuiltExit, FoundExits
from offramp.engine.common.environment import package_version

_log = logging.getLogger(__name__)

_PLACES: Final = {"model", "data", "output", "overwrite", "scratch", "scratch_limit"}
"""Options that change nothing of what is trained."""
_EXITS: Final = "exits.json"
_STATE: Final = "weights.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointFolder:
    """``model.ee.training``: exits and weights so far."""

    path: Path
    digest: str
    """Of model, data, options and versions."""

    @classmethod
    def of(cls, sliced: Sliced, run: CompileRun) -> JointFolder:
        """Name the folder of a run; nothing is written yet."""
        options, parts = (
            dataclasses.asdict(dataclasses.replace(run.options, data=Path())),
            run.parts,
        )
        del options["threads"], options["training"]["threads"]  # they change no weight
        nodes = [(node.op_type, list(node.output)) for node in sliced.model.proto.graph.node]
        said = {
            "model": sliced.model.original_sha256,
            "nodes": nodes,  # simplifying may end early
            "cuts": [[tensor.name for tensor in cut.tensors] for cut in sliced.cuts],
            "data": parts.train.sha256,
            "samples": [len(parts.train), len(parts.tune), len(parts.certify)],
            "options": {k: v for k, v in options.items() if k not in _PLACES},
            "versions": [package_version(name) for name in ("offramp", "torch", "onnxruntime")],
        }
        text = json.dumps(said, sort_keys=True, default=str)
        output = run.options.output
        path = output.with_name(output.name + ".training")
        return cls(path=path, digest=hashlib.sha256(text.encode()).hexdigest())

    def check(self) -> None:
        """Refuse to replace what is no folder of a training: a CompileError."""
        if self.path.exists() and not (self.path / _EXITS).is_file():
            raise CompileError(
                f"{self.path} is there, and is no folder of a training that was interrupted; it is "
                "where --train joint keeps what it has: move it, or name another --output"
            )

    def exits(self, sliced: Sliced) -> FoundExits | None:
        """Read the exits that an earlier run found; ``None`` if there was none of this kind."""
        try:
            plain = parse_json(read_limited(self.path / _EXITS, MAX_JSON_BYTES), _EXITS)
            if plain["digest"] != self.digest:
                _log.warning("%s is of another compilation: it is replaced.", self.path)
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
        """Write the exits; an ``OSError`` if that fails."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for number, exit_ in enumerate(found.built):
            (self.path / f"{number:02d}.onnx").write_bytes(exit_.graph)
        plain = {
            "digest": self.digest,
            "built": [_described(number, exit_) for number, exit_ in enumerate(found.built)],
            "best": to_plain(found.best),
        }
        # last: a folder without it was not completed
        (self.path / _EXITS).write_text(json.dumps(plain))

    def state(self, joined: bytes) -> JointState:
        """Give the file that keeps the weights of a joint graph while it is trained."""
        digest = hashlib.sha256(self.digest.encode() + hashlib.sha256(joined).digest())
        return JointState(path=self.path / _STATE, digest=digest.hexdigest())

    def remove(self) -> None:
        """Remove it: the bundle is written."""
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
