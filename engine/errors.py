"""Errors of the engine, named by whose fault they are.

::

    EngineError
    ├── InvalidRequestError        the caller's: mend the request
    │   ├── ModelNotServedError    no model of that name is served
    │   └── BadInputError          a tensor's name, shape, dtype or content is wrong
    ├── CapacityError              nobody's: try again later, or send less
    │   ├── QueueFullError         the bounded queue has no room
    │   ├── DeadlineExceededError  the deadline passed before an answer was there
    │   └── DrainingError          the engine is shutting down and takes no new requests
    ├── BackendError               ours or the model's: execution failed; its batch only
    │   └── OutOfServiceError      nothing can be executed now; another server may
    ├── OptionsError               whoever started the engine's: an option does not fit a model
    └── JobError                   a controller's job has no result (job_runner)
"""


class EngineError(Exception):
    """Base of all errors of :mod:`offramp.engine`."""


class InvalidRequestError(EngineError):
    """The request is wrong; sending it again will not help."""


class ModelNotServedError(InvalidRequestError):
    """No model of that name is served."""


class BadInputError(InvalidRequestError):
    """A tensor's name, shape, dtype or content is not what the model takes."""


class CapacityError(EngineError):
    """The request was right, but there was no room or no time for it."""


class QueueFullError(CapacityError):
    """The bounded queue has no room for the request's samples."""


class DeadlineExceededError(CapacityError):
    """The deadline passed before the request's last sample had its answer."""


class DrainingError(CapacityError):
    """The engine is shutting down and takes no new requests."""


class BackendError(EngineError):
    """The backend could not load or execute a stage."""


class OutOfServiceError(BackendError):
    """No stream of the device can run anything; they are tried again."""


class OptionsError(EngineError, ValueError):
    """An option of the engine does not fit the model that it is for."""
