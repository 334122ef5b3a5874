"""Reading the user's ONNX file into a model that can be sliced."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.options import AskedTask
from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS
from offramp.compiler.frontend.answer import answer_with_classes, find_answer, keep_answer
from offramp.compiler.frontend.answer_tokens import answer_with_tokens
from offramp.compiler.frontend.batch import fix_baked_sizes, free_batch
from offramp.compiler.frontend.cut_preparation import anchor_shapes, turn_batch_first
from offramp.compiler.frontend.decoder_cache import check_no_cache
from offramp.compiler.frontend.model_checks import check_inference, check_some_input
from offramp.compiler.frontend.preparation import (
    give_column,
    modern,
    name_operators,
    remove_unused,
    settle_inputs,
    simplified,
    specs,
    unlist_initializers,
)
from offramp.compiler.frontend.simplifier import LIMIT_S
from offramp.compiler.frontend.source_file import load_source, refusing
from offramp.compiler.graphs.graph import default_opset
from offramp.compiler.graphs.runtime import check_operators
from offramp.compiler.graphs.shapes import annotate
from offramp.compiler.graphs.source_model import SourceModel, drop_unread
from offramp.compiler.graphs.tail import find_dense_tail

_log = logging.getLogger(__name__)


def read_model(
    path: str | os.PathLike[str],
    *,
    answer: str | None = None,
    answer_tokens: Sequence[int] = (),
    task: AskedTask | None = None,
    simplify: bool = True,
    simplify_limit: float = LIMIT_S,
    scratch: ScratchSpace | None = None,
    max_cut_tensors: int = MAX_CUT_TENSORS,
) -> SourceModel:
    """Read a model and bring it into the form that slicing needs.

    External data are looked for beside the file; ``answer`` names the output to keep, where there
    are several; ``task`` is what is said of it, else it is inferred; ``answer_tokens`` are the
    tokens that a decoder [batch, tokens, vocabulary] answers with
    (:mod:`.frontend.answer_tokens`); ``simplify`` folds constants and fuses with onnxslim,
    if that computes the same and takes no longer than ``simplify_limit`` seconds. Files of a large
    model go to ``scratch``. Cut points of up to ``max_cut_tensors`` tensors are prepared.

    Raises:
        ModelError: The file is missing, no ONNX model, or has a property that is not supported.
    """
    path = Path(path)
    asked = task or AskedTask()
    proto, digest = load_source(path)
    with refusing(path):
        check_operators(proto)
        proto = modern(proto)
        unlist_initializers(proto)
        if answer_tokens:
            answer_with_tokens(proto, tuple(answer_tokens), answer)
        else:
            check_no_cache(proto)
        keep_answer(proto, answer)
        flat = give_column(proto)
        if asked.class_map:
            answer_with_classes(proto)
        remove_unused(proto)
        declared = settle_inputs(proto)
        check_inference(proto.graph)
        if baked := fix_baked_sizes(proto):
            _log.warning("%s", baked)
        free_batch(proto)
        if simplify:
            proto = simplified(proto, limit_s=simplify_limit, scratch=scratch)
            drop_unread(proto.graph)
            check_some_input(proto)
        name_operators(proto)
        annotate(proto)
        proto = anchor_shapes(proto, max_tensors=max_cut_tensors)
        proto = turn_batch_first(proto, max_tensors=max_cut_tensors)
        found = find_answer(proto, asked)
        found = replace(found, tokens=tuple(answer_tokens), flat=flat)
        inputs = specs(proto, [i.name for i in proto.graph.input])
        outputs = specs(proto, [o.name for o in proto.graph.output])
    model = SourceModel(
        proto=proto,
        name=path.stem,
        inputs=inputs,
        outputs=outputs,
        original_sha256=digest,
        opset=default_opset(proto),
        answer=found,
        unread=declared.unread(proto.graph),
    )
    return replace(model, tail=find_dense_tail(proto, model.flow, found))
