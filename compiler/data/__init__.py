"""Kinds of data that ``--data`` and the API take, each of them a source of samples.

:mod:`.find` tells kinds apart; :mod:`.batches` has arrays and iterables of a program's own.
"""

from offramp.compiler.data.batches import ArraySource, IterableSource
from offramp.compiler.data.find import as_source, find_source
from offramp.compiler.data.spec import PreprocessingSpec

__all__ = ["ArraySource", "IterableSource", "PreprocessingSpec", "as_source", "find_source"]
