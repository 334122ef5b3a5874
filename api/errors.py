"""Errors of the API that are not those of compiler, engine or server."""

from __future__ import annotations

from offramp.compiler.common.errors import CompileError


class ModelClosedError(RuntimeError):
    """A model was used after it had been closed."""


class ForkedError(RuntimeError):
    """The process was forked after a model was opened: the threads stayed in the parent."""


class ModuleExportError(CompileError):
    """A torch module cannot be exported; the message has the reasons of torch's exporters."""


class ExportCheckError(CompileError):
    """The exported model answers otherwise than the torch module."""
