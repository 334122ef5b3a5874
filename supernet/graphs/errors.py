"""Errors of supernets."""

from __future__ import annotations

from offramp.compiler.common.errors import CompileError


class ElasticSpecError(CompileError):
    """The file of elastic parts is malformed, or names parts that do not exist."""


class NotElasticError(CompileError):
    """The graph cannot be reduced where requested; the message names the operator."""
