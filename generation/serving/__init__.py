"""Serving of generating models: threads that run backends, streams of tokens, an engine."""

from offramp.generation.serving.generating_model import (
    GeneratingModel,
    TextOptions,
    TextStatistics,
    Token,
)

__all__ = ["GeneratingModel", "TextOptions", "TextStatistics", "Token"]
