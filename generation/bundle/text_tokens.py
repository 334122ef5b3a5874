"""Conversion of text to tokens and back, with a model's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from offramp.bundle import BundleError
from offramp.bundle.optional_imports import optional_import

_INSTALL: Final = "pip install 'offramp[text]'"


class BundleTokenizer:
    """A tokenizer of the package tokenizers, without padding and truncation."""

    def __init__(self, content: bytes, *, name: str = "tokenizer.json") -> None:
        """Read a ``tokenizer.json``; ``name`` describes its location in messages.

        Raise BundleError if it is not a tokenizer, or if the package ``tokenizers`` is not
        installed.
        """
        with optional_import("tokenizers", install=_INSTALL, raises=BundleError):
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises Exception itself
            reason = " ".join(str(error).split())
            raise BundleError(
                f"{name} is not a tokenizer of Hugging Face ({reason:.150}); expected a "
                "tokenizer.json, as Tokenizer.save writes it"
            ) from error
        self.content: Final = content
        """Bytes of the ``tokenizer.json`` that was read."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, including those that the tokenizer adds."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
