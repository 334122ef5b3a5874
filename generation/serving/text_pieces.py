"""Conversion between text and tokens, and incremental text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

_BROKEN: Final = "\ufffd"
"""Replacement character, which stands for bytes that are not (yet) a complete character."""


class TextCodec(Protocol):
    """Converts text to tokens, and tokens to text."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a prompt, including special tokens at its start or end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        ...


class TextPieces:
    """Converts tokens to pieces of text as they arrive; the joined pieces are the whole text.

    A token may be only a part of a character (byte-level tokens), and its text may depend on the
    previous token (the space between words). So a token is decoded together with the last ones
    before it, and trailing bytes that are not a character wait for the next tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        """Last tokens of the answer: the tokens of the last returned piece of text, and all later
        tokens."""
        self._before = 0
        """Number of the window's first tokens whose text is complete."""
        self._given = 0
        """Number of characters of the window's text that were returned."""

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while the tokens end within a character."""
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
        """Return the rest, if the tokens end within a character."""
        rest = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._before, self._given = [], 0, 0
        return rest
