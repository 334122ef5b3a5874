"""An ONNX model as it is, as a bundle: without data, without exits, in seconds."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Manifest, Segment, write_bundle
from offramp.bundle.bundle import bundle_name
from offramp.bundle.files import FileContent, check_space, dump
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.onnx_wire import without_inputs
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.bundle.writing import check_target
from offramp.compiler.blueprints.packing import PROFILE, tool_versions
from offramp.compiler.common.asked_task import AskedKind, AskedTask
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.slicing import SOURCE
from offramp.compiler.graphs.custom_ops import libraries_of
from offramp.compiler.graphs.graph import weight_bytes
from offramp.compiler.graphs.weights import pack_weights
from offramp.compiler.plain.reading import UnslicedModel, read_plain
from offramp.compiler.plain.trial import PlainTrial
from offramp.compiler.samples.value_bounds import find_value_bounds
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """One run of ``eecompile wrap``."""

    model: Path
    output: Path
    overwrite: bool = False
    answer: str | None = None
    """The output to serve, where the model has several."""
    task: AskedKind = "auto"
    """What answers are; ``auto`` infers it, and takes any other answer as it is."""
    threads: int = field(default_factory=available_cores)
    """Of ONNX Runtime while the model is timed."""


def wrap_model(
    options: WrapOptions,
    progress: Progress = SILENT,
    note: Callable[[str], None] = _log.warning,
) -> Bundle:
    """Write the bundle of a model as it is: one segment, which is the model, and no exits.

    ``note`` is called with each sentence on what is served otherwise than the file declares.

    Raises:
        ModelError: The model cannot be read or served.
        VerificationError: What would be served computes something else than the file.
        BundleExistsError: There is something at ``options.output`` already.
        BundleWriteError: Nothing can be written there, or the disk has too little space.
    """
    check_target(options.output, overwrite=options.overwrite)
    with progress.step("Read the model", 1):
        plain = read_plain(options.model, answer=options.answer, task=AskedTask(kind=options.task))
    for each in plain.notes:
        note(each)
    check_space(options.output, weight_bytes(plain.source.proto))
    graph = plain.graph().SerializeToString()
    unread = frozenset(each.spec.name for each in plain.source.unread)
    with progress.step("Try the model", 1):
        try:
            trial = PlainTrial.of(plain, without_inputs(graph, unread), options.threads)
            sample = trial.sample()
        except ModelError as error:
            raise ModelError(f"{options.model}: {error}") from error
        trial.compare_with(options.model)
        profile = trial.profile()
    del trial
    if plain.no_batching:
        _log.warning("Every sample will be served by itself: %s.", plain.no_batching)
    packed = pack_weights({SOURCE: graph}, None)
    files: dict[str, FileContent] = {**packed.graphs, PROFILE: dump(profile)}
    if packed.sizes.file_bytes:
        files[WEIGHTS] = packed.pieces()
    manifest, policy = _manifest(plain, options, sample), ExitPolicy(version=1, active=())
    with progress.step("Write the bundle", 1):
        return write_bundle(options.output, manifest, policy, files, overwrite=options.overwrite)


def _manifest(
    plain: UnslicedModel, options: WrapOptions, sample: Mapping[str, NDArray[Any]]
) -> Manifest:
    model = plain.source
    segment = Segment(
        index=0,
        file=SOURCE,
        inputs=tuple(spec.name for spec in model.inputs),
        output=model.answer.output,
        flops_share=1.0,
        row_bytes=0,
        weight_bytes=weight_bytes(model.proto),
    )
    return Manifest(
        name=bundle_name(options.output),
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tools=tool_versions(),
        source=Source(
            file=SOURCE,
            original_name=options.model.name,
            original_sha256=model.original_sha256,
            opset=model.opset,
        ),
        inputs=model.inputs,
        unread=model.unread,
        outputs=model.outputs,
        answer=model.answer,
        segments=(segment,),
        exits=(),
        calibration=Calibration(
            data_sha256="",
            train_samples=0,
            tune_samples=0,
            certify_samples=0,
            sample_shapes={name: array.shape[1:] for name, array in sample.items()},
            reference_batch_size=1,
        ),
        verified_tolerance=rounding_of(model.proto).batches,
        custom_ops=libraries_of(model.proto),
        value_bounds=find_value_bounds(model, sample),
        no_batching=plain.no_batching,
    )
