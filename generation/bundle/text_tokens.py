"""Conversion of text to tokens and back, with a model's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offramp.bundle import BundleError

_INSTALL = "pip install 'offramp[text]'"


class TextTokens:
    """A tokenizer of the package tokenizers."""

    def __init__(self, content: bytes) -> None:
        """Read ``tokenizer.json``; BundleError if it is invalid or the package is not installed."""
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise BundleError(f"text needs the package tokenizers: {_INSTALL}") from error
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises Exception itself
            raise BundleError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, including those that the tokenizer adds."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
