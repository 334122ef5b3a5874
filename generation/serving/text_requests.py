"""Text requests and answers as tensors, with the names of Triton's generate extension."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.certify.decision import MODEL_END
from offramp.engine.common.errors import BadInputError
from offramp.engine.common.validation import check_tensors
from offramp.engine.requests.results import ModelInfo, ResultKind, StreamResult, StringSpec
from offramp.generation.serving.generating_model import Token
from offramp.generation.serving.text_pieces import TextCodec

INPUT_IDS: Final = TensorSpec(name="input_ids", dtype="int64", shape=("prompt",))
TEXT_INPUT: Final = StringSpec(name="text_input", shape=(1,))
MAX_TOKENS: Final = TensorSpec(name="max_tokens", dtype="int32", shape=(1,))
OUTPUT_IDS: Final = TensorSpec(name="output_ids", dtype="int64", shape=("answer",))
TEXT_OUTPUT: Final = StringSpec(name="text_output", shape=(1,))
END: Final = "offramp_end"
"""Parameter of the last response: the reason why the answer ends."""
_QUICK_CHARACTERS: Final = 4096
"""Number of characters above which a text is tokenized on a thread."""


class TextRequest(NamedTuple):
    """Prompt of a request, int64[tokens], and the largest number of tokens to generate."""

    prompt: NDArray[np.int64]
    most_tokens: int


async def read_text_request(
    info: ModelInfo, inputs: Mapping[str, NDArray[Any]], codec: TextCodec | None, most_tokens: int
) -> TextRequest:
    """Read a request; BadInputError if it is invalid.

    A request may have its own limit on the number of tokens, in place of ``most_tokens``.
    """
    if wrong := check_tensors(info.inputs, inputs, unread=info.optional):
        raise BadInputError(f"{info.name}: {wrong}")
    if MAX_TOKENS.name in inputs:
        most_tokens = int(inputs[MAX_TOKENS.name][0])
    if codec is None:
        return TextRequest(inputs[INPUT_IDS.name], most_tokens)
    given = [spec.name for spec in (INPUT_IDS, TEXT_INPUT) if spec.name in inputs]
    if len(given) != 1:
        raise BadInputError(
            f"{info.name}: the prompt is {' and '.join(given) or 'missing'}; send either "
            f"{INPUT_IDS.describe()} or {TEXT_INPUT.describe()}"
        )
    if INPUT_IDS.name in inputs:
        return TextRequest(inputs[INPUT_IDS.name], most_tokens)
    try:
        text = inputs[TEXT_INPUT.name][0].decode()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{info.name}: {TEXT_INPUT.name} is not UTF-8: {error}") from error
    if len(text) > _QUICK_CHARACTERS:
        tokens = await asyncio.to_thread(codec.encode, text)
    else:
        tokens = codec.encode(text)
    if not tokens:
        raise BadInputError(f"{info.name}: {TEXT_INPUT.name} {text!r:.80} has no tokens")
    return TextRequest(np.array(tokens, np.int64), most_tokens)


def text_result(
    tokens: Sequence[Token], text: str, *, stages: int, kind: ResultKind, policy: int, texts: bool
) -> StreamResult:
    """Return an answer, or a part of one, with an exit and a confidence per token.

    ``policy`` is the version of the thresholds; ``texts`` is true if there is a tokenizer.
    """
    count = len(tokens)
    given = np.array([token.stage for token in tokens], np.int32)
    exits = np.where(given == stages - 1, np.int32(MODEL_END), given)
    outputs: dict[str, NDArray[Any]] = {
        OUTPUT_IDS.name: np.array([token.token for token in tokens], np.int64)
    }
    if texts:
        outputs[TEXT_OUTPUT.name] = np.array([text.encode()], np.object_)
    end = tokens[-1].end
    return StreamResult(
        outputs=outputs,
        exits=exits,
        confidences=np.array([token.confidence for token in tokens], np.float32),
        forced=np.zeros(count, np.bool_),
        policy_version=policy,
        variants=np.zeros(count, np.int16),
        details={} if end is None else {END: end.value},
        kind=kind,
        final=exits == MODEL_END,
        corrected=np.zeros(count, np.bool_),
    )
