"""A campaign against the saved state of a controller: the server must start with any."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import pytest

from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.serving import control_loop
from offramp.engine.stages.plan import Mode
from tests.fuzz.campaign import WrongError
from tests.fuzz.mutators import archive, havoc

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "bundle"
MODEL: Final = "golden"


class _NoJobs:
    """Fake of the tuning process, whose start takes longer than all other steps."""

    def start(self) -> Future[None]:
        return Future()

    def submit(self, _job: object) -> Future[None]:
        return Future()

    def close(self) -> None:
        pass


class State:
    """Starts an engine next to a changed state file, sends a request, and closes it."""

    def __init__(self) -> None:
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(control_loop, "JobRunner", _NoJobs)
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._bundle = Path(self._folder.name) / "golden.ee"
        shutil.copytree(GOLDEN, self._bundle)
        before = set(self._bundle.parent.iterdir())
        asyncio.run(self._serve())
        (self._place,) = (
            place for place in set(self._bundle.parent.iterdir()) - before if place.suffix == ".npz"
        )
        self._kept = self._place.read_bytes()

    def seeds(self) -> Sequence[bytes]:
        return [self._kept]

    def mutate(self, case: bytes, random: Random) -> bytes:
        return (archive if random.random() < 0.9 else havoc)(case, random)

    def check(self, case: bytes) -> str:
        self._place.write_bytes(case)
        asyncio.run(self._serve())
        return "served"

    async def _serve(self) -> None:
        options = EngineOptions(
            mode=Mode.AUDIT,
            backend="onnxruntime",
            threads=1,
            defaults=ModelOptions(max_batch_size=8),
        )
        async with await Engine.open({MODEL: self._bundle}, options) as engine:
            result = await engine.infer(MODEL, {"sample": np.arange(8)[:, None]})
            if len(result.exits) != 8 or not np.isfinite(result.outputs["logits"]).all():
                raise WrongError("a request after the start had no right answer")

    def close(self) -> None:
        self._patched.undo()
        self._folder.cleanup()
