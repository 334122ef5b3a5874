"""Serves a generating model: a thread that runs its backend, and streams of tokens in asyncio."""

from offramp.generation.serving.generating_model import (
    GeneratingModel,
    TextOptions,
    TextStatistics,
    Token,
)

__all__ = ["GeneratingModel", "TextOptions", "TextStatistics", "Token"]
