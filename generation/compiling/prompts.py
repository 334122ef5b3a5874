"""Prompts from any data that ``eecompile`` reads, and their split in three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import DataSource
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.errors import CompileError
from offramp.generation.bundle.tensor_names import IDS, MASK
from offramp.generation.compiling.text_options import TextSettings

Tokens: TypeAlias = NDArray[np.int64]
"""Token ids of one prompt or answer, int64[tokens]."""
_SHARES: Final = (0.3, 0.2)
"""Shares of the prompts for training and for tuning; the others are for certification."""
_LEAST: Final = 30
"""Smallest number of prompts for which none of the three parts is empty."""


class PromptSplit(NamedTuple):
    """Prompts for training, for the choice of exits and thresholds, and for certification."""

    train: list[Tokens]
    tune: list[Tokens]
    certify: list[Tokens]


def read_prompts(source: DataSource, scratch: ScratchSpace) -> list[Tokens]:
    """Read the tokens of all prompts: ``input_ids``, where ``attention_mask`` is 1.

    Raise DataError if the source has no ``input_ids``, or if they are not integers [prompts,
    tokens].
    """
    specs = [TensorSpec(name=n, dtype="int64", shape=("batch", "tokens")) for n in (IDS, MASK)]
    arrays, _ = source.load(specs, scratch)
    ids = arrays.get(IDS)
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
        found = "nothing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise DataError(
            f"{source.name}: prompts are {IDS}, whole numbers of shape [prompts, tokens], padded "
            f"where {MASK} is 0; found {found}. Use --tokenizer for texts"
        )
    mask = arrays.get(MASK)
    if mask is None:
        mask = np.ones(ids.shape, np.int64)
    if mask.shape != ids.shape:
        raise DataError(
            f"{source.name}: {MASK} has shape {list(mask.shape)}, expected that of {IDS}, "
            f"{list(ids.shape)}"
        )
    rows = (row[kept != 0].astype(np.int64) for row, kept in zip(ids, mask, strict=True))
    return [row for row in rows if row.size]


def check_tokens(prompts: Sequence[Tokens], settings: TextSettings, vocabulary: int) -> None:
    """Raise CompileError or DataError if a token is not in the model's vocabulary."""
    special = [*settings.stop_tokens]
    if settings.start_token is not None:
        special.append(settings.start_token)
    if any(not 0 <= token < vocabulary for token in special):
        raise CompileError(
            f"start and stop tokens {special} must be in the vocabulary, 0 to {vocabulary - 1}: "
            "see --start-token and --stop-tokens, or the model's configuration"
        )
    wrong = [prompt for prompt in prompts if prompt.min() < 0 or prompt.max() >= vocabulary]
    if wrong:
        raise DataError(
            f"{len(wrong)} prompts have tokens that the model does not know, the first from "
            f"{wrong[0].min()} to {wrong[0].max()}: expected 0 to {vocabulary - 1}; make them with "
            "the model's own tokenizer"
        )


def check_lengths(prompts: Sequence[Tokens], most: int) -> None:
    """Raise DataError if a prompt is longer than the model accepts."""
    longer = [len(prompt) for prompt in prompts if len(prompt) > most]
    if longer:
        raise DataError(
            f"{len(longer)} of {len(prompts)} prompts are too long, the longest has {max(longer)} "
            f"tokens: expected at most {most}, as the model has no positions for more with an "
            "answer; cut them, or leave them out"
        )


def split_prompts(prompts: Sequence[Tokens], seed: int) -> PromptSplit:
    """Split prompts at random into the three parts; duplicates are removed first.

    Raise DataError if there are too few.
    """
    unique = list({prompt.tobytes(): prompt for prompt in prompts}.values())
    if len(unique) < _LEAST:
        raise DataError(
            f"{len(unique)} different prompts are too few: at least {_LEAST} are split in three, "
            "and a bound of 1 % takes about 600 or more; prompts need no labels"
        )
    order = np.random.default_rng(seed).permutation(len(unique))
    ends = np.round(np.cumsum(_SHARES) * len(unique)).astype(int)
    return PromptSplit(*([unique[i] for i in part] for part in np.split(order, ends)))
