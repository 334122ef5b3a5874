"""Errors of the engine, grouped by the party at fault.

The caller is at fault (:class:`InvalidRequestError`), no party (:class:`CapacityError`), the server
or the model (:class:`BackendError`), or the person who started the engine (:class:`OptionsError`).
A controller's job without a result is a ``JobError`` of :mod:`.job_runner`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class EngineError(Exception):
    """Base of all errors of :mod:`offramp.engine`."""


class InvalidRequestError(EngineError):
    """The request is wrong; it must be changed before it is sent again."""


class ModelNotServedError(InvalidRequestError):
    """The requested model is not served."""

    @classmethod
    def of(cls, name: str, served: Iterable[str]) -> Self:
        """Return the error for a name, with the most similar served name."""
        names = sorted(served)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(map(repr, names)) or "none"
        return cls(f"no model {name!r} is served here; {hint}served: {known}")


class BadInputError(InvalidRequestError):
    """A tensor's name, shape, dtype or content does not fit the model."""


class CapacityError(EngineError):
    """The request was valid, but queue space or time was short: retry later, or send less."""


class QueueFullError(CapacityError):
    """The bounded queue cannot hold the request's samples."""


class DeadlineExceededError(CapacityError):
    """The deadline passed before the request's last sample had its answer."""


class DrainingError(CapacityError):
    """The engine is shutting down and takes no new requests."""


class BackendError(EngineError):
    """The backend could not load or execute a stage; only that stage's batch fails."""


class WorkerLostError(BackendError):
    """The process that ran a stage ended or was killed as hung; another one resumes its batch."""


class StageNotLoadedError(BackendError):
    """A device could not load a stage, for instance because its memory is too small."""

    def __init__(self, message: str, *, device: int, segments: tuple[int, int]) -> None:
        """Keep the device's number, and the stage's first and last segment.

        Devices are counted as streams are.
        """
        super().__init__(message)
        self.device = device
        self.segments = segments


class TensorsLostError(BackendError):
    """The tensors that a batch continues from were lost with their device; the batch starts again.

    Neither the batch nor its next stream is at fault.
    """


class OutOfServiceError(BackendError):
    """All streams of the device are out of service; they are retried. Try another server."""


class OptionsError(EngineError, ValueError):
    """An option of the engine does not fit its model."""
