"""Errors of compiling a model.

::

    CompileError
    ├── ModelError              the file is no ONNX model, or one that is not supported
    ├── NoCutPointError         nowhere does a single tensor carry everything onward
    ├── UnknownCutPointError    a cut point that was asked for does not exist
    ├── VerificationError       segments, or an exported file, compute something else
    ├── ExportError             a bundle cannot be exported, or not to that file
    ├── EngineOptionsError      ranges, buckets or parts that were asked for make no sense here
    ├── EnginesUnavailableError engines cannot be built on this machine
    └── EngineBuildError        an engine cannot be built, or computes something else
"""


class CompileError(Exception):
    """Base of all errors of :mod:`offramp.compiler`; the message names value and remedy."""


class ModelError(CompileError):
    """The model cannot be read, or has a property that is not supported."""


class NoCutPointError(CompileError):
    """The model has no place where an exit could be attached."""


class UnknownCutPointError(CompileError):
    """The user's list of exits names a cut point that the model does not have."""


class VerificationError(CompileError):
    """Segments compute something else than the source model, or an export than its bundle."""


class ExportError(CompileError):
    """The bundle cannot be exported as it is, or the target cannot be written."""


class EngineOptionsError(CompileError):
    """What was asked for of engines is malformed, or does not fit the model."""


class EnginesUnavailableError(CompileError):
    """This machine lacks what building engines needs."""


class EngineBuildError(CompileError):
    """An engine cannot be built or run, or does not compute what its graph does."""
