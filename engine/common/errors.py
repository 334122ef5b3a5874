"""Errors of the engine, named by whose fault they are.

The caller's (:class:`InvalidRequestError`), nobody's (:class:`CapacityError`), ours or the model's
(:class:`BackendError`), or of whoever started the engine (:class:`OptionsError`). A controller's
job that has no result is a ``JobError`` of :mod:`.job_runner`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class EngineError(Exception):
    """Base of all errors of :mod:`offramp.engine`."""


class InvalidRequestError(EngineError):
    """The request is wrong; sending it again will not help, mending it will."""


class ModelNotServedError(InvalidRequestError):
    """No model of that name is served."""

    @classmethod
    def of(cls, name: str, served: Iterable[str]) -> Self:
        """Return the error of a name, with the nearest of the names that are served."""
        names = sorted(served)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(map(repr, names)) or "none"
        return cls(f"no model {name!r} is served here; {hint}served: {known}")


class BadInputError(InvalidRequestError):
    """A tensor's name, shape, dtype or content is not what the model takes."""


class CapacityError(EngineError):
    """The request was right, but there was no room or no time: try again later, or send less."""


class QueueFullError(CapacityError):
    """The bounded queue has no room for the request's samples."""


class DeadlineExceededError(CapacityError):
    """The deadline passed before the request's last sample had its answer."""


class DrainingError(CapacityError):
    """The engine is shutting down and takes no new requests."""


class BackendError(EngineError):
    """The backend could not load or execute a stage; of its batch only."""


class WorkerLostError(BackendError):
    """The process that ran a stage ended, or hung and was ended; its batch is resumed elsewhere."""


class StageNotLoadedError(BackendError):
    """A device could not load a stage: its memory does not hold it, for instance."""

    def __init__(self, message: str, *, device: int, segments: tuple[int, int]) -> None:
        """``device`` is counted as the streams are; ``segments`` are the stage's first and last."""
        super().__init__(message)
        self.device = device
        self.segments = segments


class TensorsLostError(BackendError):
    """What a batch was to go on with went with the device that had it; it starts from its inputs.

    No fault of the batch, nor of the stream that was to run it.
    """


class OutOfServiceError(BackendError):
    """No stream of the device can run anything now; they are tried again. Another server may."""


class OptionsError(EngineError, ValueError):
    """An option of the engine does not fit the model that it is for."""
