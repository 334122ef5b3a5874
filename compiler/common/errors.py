"""Errors of compiling a model, all of which are :class:`CompileError`, and names in their texts."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int) -> str:
    """Return names for a message: the first ``most``, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class CompileError(Exception):
    """Base of all errors of :mod:`offramp.compiler`; the message names value and remedy."""


class ModelError(CompileError):
    """The model cannot be read, or has a property that is not supported."""


class OptionsConflictError(CompileError):
    """Options exclude each other, or one lacks another that it needs."""


class NoCutPointError(CompileError):
    """The model has no place where an exit could be attached."""


class UnknownCutPointError(CompileError):
    """The user's list of exits names a cut point that the model does not have."""


class VerificationError(CompileError):
    """Segments and source model, or an export and its bundle, have different results."""


class ExportError(CompileError):
    """The bundle cannot be exported as it is, or the target cannot be written."""


class EngineOptionsError(CompileError):
    """An option of engines is malformed, or does not fit the model."""


class EnginesUnavailableError(CompileError):
    """This machine lacks requirements for building engines."""


class EngineBuildError(CompileError):
    """An engine cannot be built or run, or its results differ from its graph's."""
