"""Reading the user's ONNX file into a model that can be sliced."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import version_converter

from offramp.bundle.schema.inputs import TensorSpec, UnreadInput
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import AskedTask
from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS
from offramp.compiler.frontend import preparation
from offramp.compiler.frontend.answer import answer_with_classes, find_answer, keep_answer
from offramp.compiler.frontend.answer_tokens import answer_with_tokens
from offramp.compiler.frontend.batch import fix_baked_sizes, free_batch
from offramp.compiler.frontend.cut_preparation import anchor_shapes, turn_batch_first
from offramp.compiler.frontend.decoder_cache import check_no_cache
from offramp.compiler.frontend.model_checks import (
    check_batch_in_front,
    check_inference,
    check_inputs,
    check_some_input,
)
from offramp.compiler.frontend.simplifier import LIMIT_S
from offramp.compiler.frontend.source_file import load_source
from offramp.compiler.graphs.graph import default_opset
from offramp.compiler.graphs.runtime import check_operators, runs_opset
from offramp.compiler.graphs.shapes import annotate, declared_types
from offramp.compiler.graphs.source_model import DeclaredInputs, SourceModel, drop_unread
from offramp.compiler.graphs.tail import find_dense_tail

_log = logging.getLogger(__name__)

MIN_OPSET = 13
"""Older models are converted to this one, where ``axes`` are inputs and Softmax is per axis."""
_MOST_OPSET = 99
"""Where the search for the newest that can be run begins."""
MIN_IR_VERSION = 8
"""Of the file format; since 4 initializers need not be graph inputs."""


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
    try:
        limit_s = simplify_limit if simplify else None
        prepared = _prepare(
            proto,
            answer=answer,
            answer_tokens=answer_tokens,
            class_map=asked.class_map,
            limit_s=limit_s,
            scratch=scratch,
        )
        proto = turn_batch_first(
            anchor_shapes(prepared.proto, max_tensors=max_cut_tensors), max_tensors=max_cut_tensors
        )
        found = find_answer(proto, asked)
        found = replace(found, tokens=tuple(answer_tokens), flat=prepared.flat)
        inputs = specs(proto, [i.name for i in proto.graph.input])
        outputs = specs(proto, [o.name for o in proto.graph.output])
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:  # what the ONNX checker lets pass
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
        unread=prepared.unread,
        tail=find_dense_tail(proto, found),
    )


class _Prepared(NamedTuple):
    """A model in the form that :class:`SourceModel` describes, but for its cuts."""

    proto: onnx.ModelProto
    unread: tuple[UnreadInput, ...]
    flat: bool
    """Whether the file gives the answer as [batch], and ``proto`` as [batch, 1]."""


def _prepare(
    proto: onnx.ModelProto,
    *,
    answer: str | None,
    answer_tokens: Sequence[int],
    class_map: bool,
    limit_s: float | None,
    scratch: ScratchSpace | None,
) -> _Prepared:
    """Prepare a checked model; simplifying it may take ``limit_s``, and ``None`` leaves it out."""
    check_operators(proto)
    proto = modern(proto)
    preparation.unlist_initializers(proto)
    if answer_tokens:
        answer_with_tokens(proto, answer_tokens, answer)
    else:
        check_no_cache(proto)
    keep_answer(proto, answer)
    flat = preparation.give_column(proto)
    if class_map:
        answer_with_classes(proto)
    preparation.remove_unused(proto)
    declared = DeclaredInputs.of(proto.graph)
    drop_unread(proto.graph)
    check_inputs(proto)
    specs(proto, [info.name for info in proto.graph.input])
    check_batch_in_front(proto.graph)
    check_inference(proto.graph)
    if baked := fix_baked_sizes(proto):
        _log.warning("%s", baked)
    free_batch(proto)
    if limit_s is not None:
        proto = preparation.simplified(proto, limit_s=limit_s, scratch=scratch)
        drop_unread(proto.graph)
        check_some_input(proto)
    preparation.name_operators(proto)
    annotate(proto)
    return _Prepared(proto, declared.unread(proto.graph), flat)


def modern(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert to :data:`MIN_OPSET` if the model is older."""
    opset = default_opset(proto)
    if opset < MIN_OPSET:
        try:
            # before the file's IR version is raised: the converter goes by it in finding weights
            proto = version_converter.convert_version(proto, MIN_OPSET)
        except Exception as error:  # the converter raises RuntimeError and its own kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"opset {opset}, expected {MIN_OPSET} or newer, and conversion fails ({reason}); "
                f"export the model again with opset_version={MIN_OPSET} or newer"
            ) from error
        _log.info("converted from opset %d to %d", opset, MIN_OPSET)
    elif opset > MIN_OPSET and not runs_opset(opset):
        newest = next(n for n in range(min(opset, _MOST_OPSET), 0, -1) if runs_opset(n))
        raise ModelError(
            f"opset {opset} is newer than the ONNX Runtime that is installed here takes (up to "
            f"{newest}); export the model with opset_version={newest}, or install a newer "
            "onnxruntime"
        )
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    return proto


def specs(proto: onnx.ModelProto, names: list[str]) -> tuple[TensorSpec, ...]:
    """Describe inputs or outputs; ModelError if one has a type or size that is not supported."""
    types = declared_types(proto)
    try:
        return tuple(
            TensorSpec(name=n, dtype=types[n].dtype, shape=types[n].shape or ()) for n in names
        )
    except ValueError as error:
        raise ModelError(f"{', '.join(names)}: {error}") from error
