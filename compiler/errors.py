"""Errors of compiling a model.

::

    CompileError
    ├── ModelError              the file is no ONNX model, or one that is not supported
    ├── NoCutPointError         nowhere does a single tensor carry everything onward
    ├── UnknownCutPointError    a cut point that was asked for does not exist
    └── VerificationError       the chained segments do not compute what the source model does
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
    """A segment computes something else than the source model at the same place."""
