"""Texts as inputs: a tokenizer of Hugging Face makes token ids, padded and cut to one length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.optional_imports import optional_import
from offramp.calibration.data.errors import DataError
from offramp.compiler.data.reading_options import PreprocessingSpec

_log = logging.getLogger(__name__)

INSTALL: Final = "pip install 'offramp[text]'"
DEFAULT_TOKENS: Final = 128
"""Length of texts in tokens for models that accept any length."""
_FIELDS: Final = {"input_ids": "ids", "attention_mask": "attention_mask"} | {
    "token_type_ids": "type_ids"
}
"""Names of inputs that texts can feed, and the field of the tokenizer's result for each."""
_PADDING: Final = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
"""Padding tokens to look for if a tokenizer does not define one."""


class TextEncoder:
    """Converts texts to the inputs of a model."""

    def __init__(
        self, specs: Sequence[TensorSpec], tokenizer: Path, options: PreprocessingSpec, name: str
    ) -> None:
        """Read the tokenizer; DataError if it cannot be read, or the inputs are not for texts."""
        self._specs = {spec: _field(spec, specs, name) for spec in specs}
        self._length, self._asked = _length(specs, options, name)
        self._name = name
        self._tokenizer = _read(tokenizer, name)
        self._set_padding(tokenizer)
        self._truncated = self._texts = 0

    def _set_padding(self, path: Path) -> None:
        tokenizer = self._tokenizer
        padding = dict(tokenizer.padding or {})
        if not padding:
            known = [token for token in _PADDING if tokenizer.token_to_id(token) is not None]
            if not known:
                raise DataError(
                    f"{path} has no token that pads texts (tried {', '.join(_PADDING)}); enable "
                    "padding in it with Tokenizer.enable_padding(pad_id=…, pad_token=…), and save "
                    "it again"
                )
            padding = {"pad_id": tokenizer.token_to_id(known[0]), "pad_token": known[0]}
        cut = dict(tokenizer.truncation or {})
        tokenizer.enable_padding(**{**padding, "length": self._length, "pad_to_multiple_of": None})
        tokenizer.enable_truncation(**{**cut, "max_length": self._length})

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> dict[str, NDArray[Any]]:
        """Return the inputs [n, tokens] of texts or pairs of texts; DataError if that fails."""
        encodings = self._tokenizer.encode_batch(list(texts))
        if any(len(encoding.ids) != self._length for encoding in encodings):
            raise DataError(
                f"{self._name}: texts cannot be cut to {self._length} tokens, as the tokenizer "
                "adds special ones; allow more with --max-tokens"
            )
        self._texts += len(encodings)
        self._truncated += sum(bool(encoding.overflowing) for encoding in encodings)
        return {
            spec.name: np.array([getattr(each, field) for each in encodings], spec.dtype)
            for spec, field in self._specs.items()
        }

    def warn_of_truncation(self) -> None:
        """Warn if texts were cut to a length that neither the user nor the model set."""
        if self._truncated and not self._asked:
            _log.warning(
                "%s: %d of %d texts are cut to %d tokens; allow more with --max-tokens if longer "
                "texts are served.",
                self._name, self._truncated, self._texts, self._length,
            )  # fmt: skip


def _read(path: Path, name: str) -> Any:
    with optional_import("tokenizers", install=INSTALL, raises=DataError):
        import tokenizers  # noqa: PLC0415 - an optional package

    if not path.is_file():
        raise DataError(f"--tokenizer {path}: no such file; expected a tokenizer.json for {name}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare ones
        reason = " ".join(str(error).split())
        raise DataError(
            f"--tokenizer {path} is not a tokenizer of Hugging Face ({reason:.150}); expected a "
            "tokenizer.json, as Tokenizer.save writes it"
        ) from error


def _field(spec: TensorSpec, specs: Sequence[TensorSpec], name: str) -> str:
    """Return the field of the tokenizer's result that feeds an input; DataError if none does."""
    whole = np.dtype(spec.dtype).kind in "iu" and len(spec.shape) == 2
    field = _FIELDS.get(spec.name) or ("ids" if len(specs) == 1 else None)
    if not whole or field is None:
        raise DataError(
            f"{name}: texts can fill only inputs of integers [batch, tokens] with the name "
            f"{', '.join(_FIELDS)} (or any name, for a model with one input), but the model has "
            f"the input {spec.describe()}; pass arrays for all inputs, or a module:function "
            "that yields batches"
        )
    return field


def _length(specs: Sequence[TensorSpec], options: PreprocessingSpec, name: str) -> tuple[int, bool]:
    """Return the length of all texts in tokens, and whether the user or the model set it."""
    fixed = {spec.shape[1] for spec in specs if isinstance(spec.shape[1], int)}
    asked = options.max_tokens
    if not fixed:
        return asked or DEFAULT_TOKENS, asked is not None
    length = min(fixed)
    if asked not in (None, length):
        raise DataError(
            f"{name}: --max-tokens {asked}: the model takes texts of {length} tokens; leave it "
            "out, or export the model with a free length"
        )
    return length, True
