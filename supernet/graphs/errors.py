"""What can be wrong with a supernet."""

from __future__ import annotations

from offramp.compiler.common.errors import CompileError


class ElasticSpecError(CompileError):
    """The file that says what of a supernet is elastic is malformed, or names what is not there."""


class NotElasticError(CompileError):
    """The graph cannot be made smaller where it was asked to be; the message names the operator."""
