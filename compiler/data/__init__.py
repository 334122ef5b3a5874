"""Kinds of data that ``--data`` and the API accept; each kind is a source of samples.

:mod:`.find_source` recognises the kind; :mod:`.batches` reads a program's arrays and iterables.
"""

from offramp.compiler.data.batches import ArraySource, IterableSource
from offramp.compiler.data.find_source import as_source, find_source
from offramp.compiler.data.reading_options import PreprocessingSpec

__all__ = ["ArraySource", "IterableSource", "PreprocessingSpec", "as_source", "find_source"]
