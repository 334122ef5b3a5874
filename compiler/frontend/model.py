"""Reading the user's ONNX file into a model that can be sliced."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS
from offramp.compiler.frontend.answer import find_answer
from offramp.compiler.frontend.passes import SLICEABLE, ModelDraft, PassError, prepare
from offramp.compiler.frontend.preparation import specs
from offramp.compiler.frontend.simplifier import LIMIT_S
from offramp.compiler.frontend.source_file import load_source
from offramp.compiler.graphs.graph import Dataflow, default_opset
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import find_dense_tail
from offramp.compiler.graphs.weights import WeightFile

_log = logging.getLogger(__name__)


def read_model(
    path: str | os.PathLike[str],
    *,
    answer: str | None = None,
    answer_tokens: Sequence[int] = (),
    task: TaskOptions | None = None,
    simplify: bool = True,
    simplify_limit: float = LIMIT_S,
    weights: WeightFile | None = None,
    max_cut_tensors: int = MAX_CUT_TENSORS,
) -> SourceModel:
    """Read a model and convert it to the form that slicing needs.

    Args:
        path: The ONNX file; external data is read from its folder.
        answer: Name of the output to keep, if there are several.
        answer_tokens: Tokens that a decoder [batch, tokens, vocabulary] answers with
            (:mod:`.frontend.answer_tokens`).
        task: The user's options about the task; it is inferred by default.
        simplify: Whether to fold constants and fuse operators with onnxslim, if the result computes
            the same.
        simplify_limit: Seconds that onnxslim may take.
        weights: File for the model's large weights. With such a file, models may be of any size.
        max_cut_tensors: Largest number of tensors at a cut point.

    The steps and their order are :data:`.passes.SLICEABLE`.

    Raises:
        ModelError: The file is missing, not an ONNX model, or has a property that is not supported.
        ScratchError: The disk has no space for the weights.
    """
    path = Path(path)
    asked = task or TaskOptions()
    proto, digest = load_source(path, weights)
    draft = ModelDraft(
        proto=proto,
        answer=answer,
        answer_tokens=tuple(answer_tokens),
        class_map=asked.class_map,
        simplify_limit_s=simplify_limit if simplify else None,
        weights=weights,
        max_cut_tensors=max_cut_tensors,
        note=lambda text: _log.warning("%s", text),
    )
    try:
        prepare(draft, SLICEABLE)
        proto = draft.proto
        found = find_answer(proto, asked)
        found = replace(found, tokens=draft.answer_tokens, flat=draft.flat)
        inputs = specs(proto, [i.name for i in proto.graph.input])
        outputs = specs(proto, [o.name for o in proto.graph.output])
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (
        ValueError,
        LookupError,
        TypeError,
        PassError,
    ) as error:  # the ONNX checker accepts such files
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ModelError(
            f"{path}: contradicts itself ({reason}); export the model again"
        ) from error
    return SourceModel(
        proto=proto,
        name=path.stem,
        inputs=inputs,
        outputs=outputs,
        original_sha256=digest,
        opset=default_opset(proto),
        answer=found,
        unread=draft.unread,
        tail=find_dense_tail(proto, Dataflow(proto.graph), found),
    )
