"""``offramp.compile``: compiles a model from a Python program, as ``eecompile`` does."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeGuard, Unpack

from offramp.api.keywords import (
    PathLike,
    check_keywords,
    options_from,
    without_flags,
)
from offramp.bundle import Bundle
from offramp.bundle.schema.compilation import Teacher
from offramp.bundle.writing import check_target
from offramp.calibration.data.dataset import LABEL_KEYS
from offramp.calibration.data.training_options import TrainingOptions
from offramp.compiler.common.errors import OptionsConflictError
from offramp.compiler.common.options import (
    AskedKind,
    AskedPrecision,
    CompileOptions,
    HeadFamily,
    Selection,
    Training,
    check_options,
)
from offramp.compiler.common.progress import Progress
from offramp.compiler.data.reading_options import (
    OPTIONS,
    Layout,
    PreprocessingSpec,
    Resample,
    Resize,
)
from offramp.engine.answers.criteria import known_criterion
from offramp.engine.common.environment import available_cores

if TYPE_CHECKING:
    import onnx
    from torch import nn

_FIELDS: Final = {"confidence": "confidence_level"}
"""Names of the options' fields, by keyword argument, where the two names differ."""
_ARGUMENTS: Final = ("output", "example_inputs", "max_disagreement", "overwrite", "progress")
"""Keyword arguments of :func:`compile` that are not fields of the options."""


class CompileKeywords(TypedDict, total=False):
    """Options of compiling: flags of ``eecompile`` (see ``eecompile --help-all``)."""

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
    min_gain: float
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
    image_size: Sequence[int]
    mean: float | Sequence[float]
    std: float | Sequence[float]
    scale: float
    layout: Layout
    resize: Resize
    crop_share: float
    resample: Resample
    image_column: str
    tokenizer: PathLike
    text_column: str | Sequence[str]
    max_tokens: int
    label_column: str
    max_samples: int


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
            exported with torch's exporter; the exported model is compared with the module.
        data: Calibration samples: a path as for ``--data``, arrays by input name, or an iterable
            of batches such as a data loader. Labels are not needed.
        output: The bundle's folder. By default ``MODEL.ee`` next to the file, or for a module
            ``CLASS.ee`` in the working directory.
        example_inputs: Inputs for the export of a module: a tuple in the order of ``forward``, or
            a mapping by its parameters. By default the first batch of ``data``.
        max_disagreement: Largest share of answers that may differ from the unmodified model's.
        overwrite: Whether to replace a bundle at ``output``.
        progress: Whether to show steps on standard error; by default in terminals and notebooks.
        **options: Flags of ``eecompile``: ``--reference-batch-size 16`` is
            ``reference_batch_size=16``, ``--no-simplify`` is ``simplify=False``.

    Raises:
        TypeError: An option is unknown or has another type, or example inputs do not fit.
        ValueError: An option's value is out of range.
        CompileError: The model cannot be exported or sliced.
        DataError: The data do not fit the model, or are too few.
        BundleExistsError: ``output`` exists already.
        ImportError: A package of the extra ``compile`` is missing.
    """
    check_keywords("compile", options, CompileKeywords, named=_ARGUMENTS)
    compile_options = _options(
        output=_output_of(model, output),
        overwrite=overwrite,
        max_disagreement=max_disagreement,
        **options,
    )
    spec = _preprocessing(options)
    check_target(compile_options.output, overwrite=overwrite)
    with _needing_extra():
        from offramp.compiler.data import as_source  # noqa: PLC0415 - needs the extra
        from offramp.compiler.steps.compile import check_samples, compile_model  # noqa: PLC0415

        if example_inputs is None and _is_module(model):
            example_inputs, data = _first_batch(model, data)
        compile_options = dataclasses.replace(compile_options, data=as_source(data, spec))
        check_samples(compile_options)  # before the export, which takes long
        with _shown(progress) as steps, _as_file(model, example_inputs, steps) as file:
            return compile_model(dataclasses.replace(compile_options, model=file), steps)


def _options(**given: Any) -> CompileOptions:
    """Return the options of compiling, without model and data; ValueError if out of range."""
    known_criterion(given.get("criterion", "probability"))  # raises before slow work begins
    if given.get("scratch") is not None:
        given["scratch"] = Path(given["scratch"])
    for name in ("exits", "answer_tokens"):
        given[name] = tuple(given.get(name, ()))
    try:
        training = options_from(TrainingOptions, given, {}, threads=available_cores())
        nowhere = {"model": Path(), "data": Path()}
        compile_options = options_from(
            CompileOptions.of,
            given,
            _FIELDS,
            own=CompileOptions.names(),
            training=training,
            **nowhere,
        )
        check_options(compile_options)
    except (ValueError, OptionsConflictError) as error:
        raise ValueError(without_flags(str(error))) from error
    return compile_options


def _preprocessing(given: Mapping[str, Any]) -> PreprocessingSpec:
    """Return the options of reading data; ValueError if one is out of range."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        if option.field in given:
            value = given[option.field]
            written = isinstance(value, Sequence) and not isinstance(value, str)
            try:  # checks as for the command line and preprocessing.toml
                found[option.field] = option.parse(
                    ",".join(map(str, value)) if written else str(value)
                )
            except ArgumentTypeError as error:
                raise ValueError(f"{option.field}: {error}") from error
    return PreprocessingSpec(**found)


def _output_of(model: object, output: PathLike | None) -> Path:
    """Return the folder of the new bundle."""
    if output is not None:
        return Path(output)
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.name:
            raise ValueError(f"model is {model!r}, expected the path of an ONNX file")
        return path.with_suffix(".ee")
    return Path(f"{_name_of(model)}.ee")


def _name_of(model: object) -> str:
    return type(model).__name__ if _is_module(model) else "model"


def _is_module(model: object) -> TypeGuard[nn.Module]:
    """Return whether a model is a torch module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


@contextmanager
def _as_file(model: object, example_inputs: object, progress: Progress) -> Iterator[Path]:
    """Yield the file of a model; for a model in memory, a temporary file."""
    if isinstance(model, str | os.PathLike):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="offramp-") as folder:
        path = Path(folder, f"{_name_of(model)}.onnx")
        if _is_module(model):
            from offramp.api.torch_export import export_module  # noqa: PLC0415 - imports torch

            with progress.step("Export the module", 1):
                export_module(model, example_inputs, path)
        else:
            import onnx  # noqa: PLC0415 - heavy

            if not isinstance(model, onnx.ModelProto):
                raise TypeError(
                    f"model is a {type(model).__name__}, expected the path of an ONNX file, an "
                    "onnx.ModelProto or a torch.nn.Module"
                )
            from offramp.compiler.graphs.weights import save  # noqa: PLC0415 - imports onnx

            save(model, path)
        yield path


def _first_batch(module: nn.Module, data: object) -> tuple[object, object]:
    """Return example inputs from the first batch of data, and data that still contain it.

    Raises:
        TypeError: The data are not batches.
    """
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    if isinstance(data, str | os.PathLike) or not isinstance(data, Iterable):
        raise TypeError(
            f"a {type(module).__name__} cannot be exported without an example, and data is not an "
            "iterable of batches to take one from; pass example_inputs=(tensor, …), or a mapping "
            "by the parameters of forward"
        )
    if isinstance(data, Mapping | tuple) or hasattr(data, "__array__"):
        batch = data
    else:
        batches = iter(data)
        try:
            batch = next(batches)
        except StopIteration:
            raise TypeError("data is an iterable without batches; pass at least one") from None
        if batches is data:  # an iterator can be read only once
            data = itertools.chain([batch], batches)
    return _inputs_of(module, batch), data


def _inputs_of(module: nn.Module, batch: object) -> object:
    """Return a batch without items that the module has no parameter for, such as labels."""
    parameters = inspect.signature(module.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if isinstance(batch, Mapping):
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        named = {n: v for n, v in batch.items() if takes_all or n in parameters}
        return {name: value for name, value in named.items() if name not in LABEL_KEYS}
    if not isinstance(batch, tuple | list):
        return batch
    from offramp.compiler.data.batches import as_array  # noqa: PLC0415

    required = sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters.values()
    )
    if len(batch) > max(1, required):
        last = as_array(batch[-1], "data: the last array of the first batch")
        if last.ndim == 1 and last.dtype.kind in "iu":  # as data sources recognise labels
            return tuple(batch[:-1])
    return tuple(batch)


@contextmanager
def _shown(progress: bool | None) -> Iterator[Progress]:  # noqa: FBT001
    """Yield a progress display on standard error; ``None`` shows it in terminals and notebooks."""
    from rich.console import Console  # noqa: PLC0415 - slow to import

    from offramp.compiler.common.progress import SILENT, TerminalProgress  # noqa: PLC0415

    console = Console(stderr=True)
    if progress is None:
        progress = console.is_terminal or console.is_jupyter
    if not progress:
        yield SILENT
        return
    with TerminalProgress(console) as bars:
        yield bars


@contextmanager
def _needing_extra() -> Iterator[None]:
    """Add a remedy to the ImportError if a package of the compiler is missing."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{error}; compiling needs the extra compile: pip install 'offramp[compile]'",
            name=error.name,
        ) from error
