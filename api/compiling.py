"""``offramp.compile``: models and data as a program has them, compiled as ``eecompile`` does."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

from offramp.api.keywords import PathLike, check_keywords, options_from, without_flags
from offramp.bundle import Bundle
from offramp.bundle.joint_training import Teacher
from offramp.bundle.writing import check_target
from offramp.compiler.asked_task import AskedKind
from offramp.compiler.options import (
    AskedPrecision,
    CompileOptions,
    HeadFamily,
    Selection,
    Training,
)
from offramp.compiler.progress import SILENT, Progress
from offramp.engine.options import available_cores

if TYPE_CHECKING:
    import onnx
    from torch import nn

_FIELDS: Final = {"confidence": "confidence_level"}
"""Fields that are not called as their keyword is."""


class CompileKeywords(TypedDict, total=False):
    """Options of compiling: flags of ``eecompile`` (``eecompile --help-all`` explains each)."""

    answer: str | None
    task: AskedKind
    agree_share: float | None
    agree_within: float | None
    class_map: bool
    answer_tokens: Sequence[int]
    mask: str | None
    criterion: str
    exits: Sequence[str]
    heads: HeadFamily
    candidates: int
    max_cut_tensors: int
    precision: AskedPrecision
    train: Training
    teach: Teacher
    joint_rate: float
    group: str | None
    copies_within: float
    max_class_disagreement: float | None
    confidence: float
    max_overhead: float | None
    selection: Selection
    rehearsal_batch: int
    max_violations: float
    tolerance: float | None
    reference_batch_size: int
    threads: int
    simplify: bool
    simplify_limit: float
    augment: Literal["auto", "off"]
    epochs: int
    seed: int
    scratch: PathLike | None
    scratch_limit: float


def compile(  # noqa: A001 - the name that users expect
    model: PathLike | onnx.ModelProto | nn.Module,
    data: object,
    *,
    output: PathLike | None = None,
    example_inputs: object = None,
    max_disagreement: float = 0.01,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Unpack[CompileKeywords],
) -> Bundle:
    """Compile a model with exits, as ``eecompile`` does; takes minutes.

    Args:
        model: An ONNX file, a model of the package ``onnx``, or a torch module. A module is
            exported by torch's exporter, and ONNX Runtime compared with it.
        data: Samples for calibration: what ``--data`` takes (a path), arrays by input name, or an
            iterable of batches such as a data loader. Labels are not needed.
        output: The bundle's folder. By default ``MODEL.ee`` beside the file, or of a module
            ``CLASS.ee`` in the working directory.
        example_inputs: Inputs that a module is exported with: a tuple in the order of ``forward``,
            or a mapping by its parameters. By default the first batch of ``data``.
        max_disagreement: Largest share of answers that may differ from the unmodified model's.
        overwrite: Whether a bundle that is at ``output`` is replaced.
        progress: Whether steps are shown on standard error; by default in terminals and notebooks.
        **options: Flags of ``eecompile``: ``--reference-batch-size 16`` is
            ``reference_batch_size=16``, ``--no-simplify`` is ``simplify=False``.

    Raises:
        TypeError: An option is unknown or of another type, or example inputs do not fit.
        ValueError: An option's value is out of range.
        CompileError: The model cannot be exported or sliced.
        DataError: The data do not fit the model, or are too few.
        BundleExistsError: There is something at ``output`` already.
        ImportError: A package of the extra ``compile`` is missing.
    """
    with _needing_extra():
        from offramp.calibration.scratch import ScratchSpace  # noqa: PLC0415 - the extra has it
        from offramp.calibration.training_options import TrainingOptions  # noqa: PLC0415
        from offramp.compiler.compile import compile_model  # noqa: PLC0415
        from offramp.compiler.data import as_source  # noqa: PLC0415
        from offramp.engine.criteria import known_criterion  # noqa: PLC0415

    named: dict[str, Any] = {"max_disagreement": max_disagreement, **options}
    check_keywords("compile", options, CompileKeywords)
    if "scratch" in named and named["scratch"] is not None:
        named["scratch"] = Path(named["scratch"])
    for name in ("exits", "answer_tokens"):
        if name in named:
            named[name] = tuple(named[name])
    known_criterion(named.get("criterion", "probability"))  # an error before anything takes time
    target = _output_of(model, output)
    check_target(target, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="offramp-", dir=named.get("scratch")) as folder:
        try:
            training = options_from(TrainingOptions, named, {}, threads=available_cores())
            asked = options_from(
                CompileOptions,
                named,
                _FIELDS,
                model=_file_name(model, Path(folder)),
                data=Path(),
                output=target,
                overwrite=overwrite,
                training=training,
            )
        except ValueError as error:
            raise ValueError(without_flags(str(error))) from error
        if example_inputs is None and _is_module(model):
            example_inputs, data = _first_batch(model, data)
        with _shown(progress) as steps:
            _write(model, example_inputs, asked.model, steps)
            asked = dataclasses.replace(asked, data=as_source(data))
            return compile_model(asked, steps, scratch=ScratchSpace(asked.scratch))
