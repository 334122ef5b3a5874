"""Errors of compiling a model, all derived from :class:`CompileError`, and lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int) -> str:
    """Return names as a list for a message: the first ``most``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class CompileError(Exception):
    """Base of all errors of :mod:`offramp.compiler`. Messages name the wrong value and a remedy."""


class ModelError(CompileError):
    """The model cannot be read, or has a property that is not supported."""


class OptionsConflictError(CompileError):
    """Two options exclude each other, or an option lacks another option that it needs."""


class NoCutPointError(CompileError):
    """The model has no place where an exit could be attached."""


class UnknownCutPointError(CompileError):
    """The user's list of exits names a cut point that the model does not have."""


class VerificationError(CompileError):
    """Segments answer differently from the source model, or an export from its bundle."""


class ExportError(CompileError):
    """The bundle cannot be exported as it is, or the target cannot be written."""


class EngineOptionsError(CompileError):
    """An option of engines is malformed, or does not fit the model."""


class EnginesUnavailableError(CompileError):
    """This machine lacks requirements for building engines."""


class EngineBuildError(CompileError):
    """An engine cannot be built or run, or its results differ from its graph's."""
