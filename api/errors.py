"""Errors of the API other than those of compiler, engine and server."""

from __future__ import annotations

from offramp.compiler.common.errors import CompileError


class ModelClosedError(RuntimeError):
    """A model was used after it was closed."""


class ForkedError(RuntimeError):
    """The process was forked after a model was opened; the model's threads are not in the fork."""


class ModuleExportError(CompileError):
    """A torch module cannot be exported; the message has the exporters' reasons."""


class ExportCheckError(CompileError):
    """The exported model's answers differ from the torch module's."""
