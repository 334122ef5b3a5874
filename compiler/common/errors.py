"""Errors of compiling a model, all of which are :class:`CompileError`."""


class CompileError(Exception):
    """Base of all errors of :mod:`offramp.compiler`; the message names value and remedy."""


class ModelError(CompileError):
    """The model cannot be read, or has a property that is not supported."""


class OptionsConflictError(CompileError):
    """Options were given that exclude each other, or one without another that it needs."""


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
