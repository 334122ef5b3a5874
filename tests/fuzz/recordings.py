"""A campaign against recorded inputs: of a torn or damaged log every sample that is read is one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.engine.learning.recording_file import (
    LOG_NAME,
    RecordingError,
    RecordingHeader,
    read_recording,
)
from offramp.engine.learning.recording_log import RecordingLog
from tests.fuzz.campaign import WrongError
from tests.fuzz.mutators import havoc

_HEADER: Final = RecordingHeader(model_sha256="0" * 64, inputs=(("x", "float32"), ("ids", "int64")))
_SAMPLES: Final = 12
_LIMIT_BYTES: Final = 2**20


class Recordings:
    """A log is damaged; the server goes on with it, and the compiler reads it."""

    def __init__(self) -> None:
        """Record samples of different lengths, some of which replace others."""
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._place = Path(self._folder.name)
        rng = np.random.default_rng(0)
        self._known: set[bytes] = set()
        log = RecordingLog(self._place, _HEADER, limit_bytes=_LIMIT_BYTES)
        for number in range(_SAMPLES):
            x = rng.standard_normal(4).astype(np.float32)
            ids = rng.integers(0, 99, 1 + number % 3)
            self._known.add(_content([x, ids]))
            sample = [(x.shape, x.tobytes()), (ids.shape, ids.tobytes())]
            log.append(number % 9, number, sample)
        log.close()
        self._whole = (self._place / LOG_NAME).read_bytes()

    def seeds(self) -> Sequence[bytes]:
        return [self._whole]

    def mutate(self, case: bytes, random: Random) -> bytes:
        return (
            case[: random.randrange(len(case) + 1)]
            if random.random() < 0.3
            else havoc(case, random)
        )

    def check(self, case: bytes) -> str:
        (self._place / LOG_NAME).write_bytes(case)
        read = self._read()
        log = RecordingLog(self._place, _HEADER, limit_bytes=_LIMIT_BYTES)
        x = np.full(4, 7, np.float32)
        ids = np.arange(2)
        log.append(0, 100, [(x.shape, x.tobytes()), (ids.shape, ids.tobytes())])
        log.close()
        self._known.add(_content([x, ids]))
        if not self._read():
            raise WrongError("a sample that was recorded after the damage cannot be read")
        return "refused" if read is None else f"{read} samples"

    def _read(self) -> int | None:
        """Return how many samples are read; ``None`` where the log is refused."""
        try:
            recorded = read_recording(self._place)
        except RecordingError:
            return None
        if recorded.header != _HEADER:
            raise WrongError(f"the header is {recorded.header}")
        for row in range(len(recorded)):
            if _content(list(recorded.sample(row).values())) not in self._known:
                raise WrongError(f"sample {row} is none that was recorded")
        return len(recorded)

    def close(self) -> None:
        self._folder.cleanup()


def _content(arrays: Sequence[NDArray[np.generic]]) -> bytes:
    return b"".join(f"{a.dtype}{a.shape}".encode() + a.tobytes() for a in arrays)
