"""Text from tokens and back: a bundle's tokenizer, and the text of an answer piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from offramp.bundle.optional_imports import optional_import
from offramp.engine.common.errors import BackendError

_BROKEN: Final = "\ufffd"
"""Stands in the text for bytes that are no whole character, perhaps not yet."""


class TextCodec(Protocol):
    """Makes tokens of a text, and a text of tokens."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a prompt, with those that a prompt begins or ends with."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        ...


class BundleTokenizer:
    """A tokenizer of the package ``tokenizers``: a :class:`TextCodec`."""

    def __init__(self, content: bytes) -> None:
        """Read the content of a ``tokenizer.json``; BackendError if that cannot be done."""
        remedy = "pip install 'offramp[text]'"
        with optional_import("tokenizers", install=remedy, raises=BackendError):
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
        try:
            self._tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise BackendError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a prompt."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(tokens))
        return text


class TextPieces:
    """Makes pieces of text of tokens as they come; joined, they are the text of all tokens.

    A token may be a part of a character only (byte-level tokens), and its text may depend on the
    one before it (the space between words). So a token is decoded together with the last ones
    before it, and bytes at the end that are no character wait for the tokens after them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The last tokens: those of a piece that was given, and those after them."""
        self._before = 0
        """Tokens of the window that ended with a whole character."""
        self._given = 0
        """Characters of the window's text that were given."""

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while it ends amid a character."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_BROKEN)
        piece = whole[self._given :]
        self._given = max(self._given, len(whole))
        if piece and whole == text:
            self._window = self._window[self._before :]
            self._before = len(self._window)
            self._given = len(self._decode(self._window))
        return piece

    def end(self) -> str:
        """Return what is left, where the tokens end amid a character."""
        rest = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._before, self._given = [], 0, 0
        return rest
