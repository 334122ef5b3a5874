"""Write an ONNX model as a bundle without exits; this needs no data, and takes seconds.

The graph is run on random inputs as it will be served. Its answers are compared with those of the
file, and it is timed.
"""

from __future__ import annotations

import datetime
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Manifest, Profile, Segment, TensorSpec, write_bundle
from offramp.bundle.bundle import bundle_name
from offramp.bundle.files import FileContent, check_space, dump
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.onnx_wire import without_inputs
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.bundle.writing import check_target
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.profiling import BATCH_SIZES, TimedGraph
from offramp.compiler.blueprints.packing import PROFILE, tool_versions
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import AskedKind, TaskOptions
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.slicing import SOURCE
from offramp.compiler.graphs.graph import weight_bytes
from offramp.compiler.graphs.runtime import describe_shapes, libraries_of, random_inputs
from offramp.compiler.graphs.shapes import BATCH
from offramp.compiler.graphs.weights import WeightFile, pack_weights, weight_file
from offramp.compiler.plain.reading import UnslicedModel, read_plain
from offramp.compiler.samples.value_bounds import find_value_bounds
from offramp.engine.answers.differences import compare
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)
Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"
_ROWS: Final = 3
_SECONDS: Final = 1.0
"""Time in seconds after which no larger batch size is timed."""
_RUNS: Final = 3
"""Number of timed runs for a batch size; the median time is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """Options of one run of ``eecompile wrap``."""

    model: Path
    output: Path
    overwrite: bool = False
    answer: str | None = None
    """Output to serve, if the model has several."""
    task: AskedKind = "auto"
    """Task of the answers. ``auto`` infers the task; if none fits, answers are served unchanged."""
    threads: int = field(default_factory=available_cores)
    """Threads of ONNX Runtime while the model is timed."""


def wrap_model(
    options: WrapOptions,
    progress: Progress = SILENT,
    note: Callable[[str], None] = _log.warning,
) -> Bundle:
    """Write the bundle of a model without exits: one segment, which is the model.

    ``note`` is called with a sentence on each difference from the file.

    Raises:
        ModelError: The model cannot be read or served.
        VerificationError: Results of the served graph differ from the file's.
        BundleExistsError: ``options.output`` exists already.
        BundleWriteError: The output cannot be written, or the disk has too little space.
        ScratchError: The folder for temporary files has no space for the model's weights.
    """
    check_target(options.output, overwrite=options.overwrite)
    with weight_file(ScratchSpace()) as weights:
        return _wrap(options, weights, progress, note)


def _wrap(
    options: WrapOptions, weights: WeightFile, progress: Progress, note: Callable[[str], None]
) -> Bundle:
    with progress.step("Read the model", 1):
        asked = TaskOptions(kind=options.task)
        plain = read_plain(options.model, answer=options.answer, task=asked, weights=weights)
    for each in plain.notes:
        note(each)
    check_space(options.output, weight_bytes(plain.source.proto))
    graph = plain.graph().SerializeToString()
    unread = frozenset(each.spec.name for each in plain.source.unread)
    with progress.step("Try the model", 1):
        of_file = AnswerOfFile.of(plain, options.model)  # before another session loads its weights
        try:
            trial = PlainTrial.of(plain, without_inputs(graph, unread), options.threads)
            sample = trial.sample()
        except ModelError as error:
            raise ModelError(f"{options.model}: {error}") from error
        if of_file is not None:
            trial.compare_with(of_file, options.model)
        profile = trial.profile()
    del trial
    if plain.no_batching:
        _log.warning("Every sample will be served alone: %s.", plain.no_batching)
    packed = pack_weights({SOURCE: graph}, weights)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOfFile:
    """ONNX Runtime's answer to some random samples, computed from the file itself."""

    feeds: Arrays
    """Values of the inputs that the model reads."""
    answer: NDArray[Any]

    @classmethod
    def of(cls, plain: UnslicedModel, file: Path) -> AnswerOfFile | None:
        """Run the file; ``None`` if it fails on random inputs."""
        model = plain.source
        rows = plain.fixed or (1 if plain.no_batching else _ROWS)
        feeds = random_inputs(model.proto, rows)
        sizes = {BATCH: rows}
        for spec in model.inputs:
            sizes |= {
                s: n
                for s, n in zip(spec.shape, feeds[spec.name].shape, strict=True)
                if isinstance(s, str)
            }
        unread = {each.spec.name: _zeros(each.spec, sizes) for each in model.unread}
        try:
            session = load_session(str(file), session_options(weights=file.parent.resolve()))
            (answer,) = session.run([model.answer.output], {**feeds, **unread})
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            _log.warning(
                "not compared with the file, which fails on random inputs: %s", _line(error)
            )
            return None
        return cls(feeds=feeds, answer=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTrial:
    """The graph of a model in a session as the server makes it."""

    plain: UnslicedModel
    timed: TimedGraph
    threads: int

    @classmethod
    def of(cls, plain: UnslicedModel, graph: bytes, threads: int) -> PlainTrial:
        """Load a graph; ModelError if ONNX Runtime refuses it."""
        try:
            timed = TimedGraph(graph, threads)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            raise ModelError(
                f"ONNX Runtime {ort.__version__} cannot load it: {_line(error)}"
            ) from error
        return cls(plain=plain, timed=timed, threads=threads)

    def sample(self) -> dict[str, NDArray[Any]]:
        """Return a random sample, with arrays [1, …] by input, after running the model on it.

        The model is also run on zeros, with which servers warm up. ModelError if a run fails.
        """
        sample = random_inputs(self.plain.source.proto, 1)
        for feeds in (sample, {name: np.zeros_like(array) for name, array in sample.items()}):
            answer = self._run(feeds)
            if answer.ndim == 0 or len(answer) != 1:
                raise ModelError(
                    f"output {self.plain.source.answer.output!r} is {list(answer.shape)} for one "
                    "sample: its first dimension has to be the batch; export the model accordingly"
                )
        return sample

    def compare_with(self, of_file: AnswerOfFile, file: Path) -> None:
        """Compare with the answer computed from the file; VerificationError if it differs."""
        model, wanted = self.plain.source, of_file.answer
        found = model.answer.served(self._run(of_file.feeds))
        if wanted.size == found.size:  # [batch, classes, 1, 1] is served as [batch, classes]
            wanted = wanted.reshape(found.shape)
        difference, rounding = compare(found, wanted), rounding_of(model.proto)
        if not difference.share <= rounding.batches:
            raise VerificationError(
                f"{file}: the graph to serve differs from the file, by {difference.describe()}; "
                f"allowed are {rounding.batches:.0e} ({rounding.name}); this is a defect, report "
                "it with the model"
            )

    def profile(self) -> Profile:
        """Time the model at increasing batch sizes, for about a second."""
        began_s, sizes, times = time.monotonic(), list[int](), list[float]()
        for size in (1,) if self.plain.no_batching else BATCH_SIZES:
            feeds = random_inputs(self.plain.source.proto, size)
            self.timed.time_ms(feeds)  # the first run at a size allocates
            runs = [self.timed.time_ms(feeds)]
            while len(runs) < _RUNS and time.monotonic() - began_s < _SECONDS:
                runs.append(self.timed.time_ms(feeds))
            sizes.append(size)
            times.append(statistics.median(runs))
            if time.monotonic() - began_s > _SECONDS:
                break
        column = tuple(max(ms, 1e-6) for ms in times)
        return Profile(
            device="cpu",
            threads=self.threads,
            batch_sizes=tuple(sizes),
            source_ms=column,
            segments_ms=(column,),
            exits_ms=(),
            stages_ms=(),
        )

    def _run(self, feeds: Arrays) -> NDArray[Any]:
        try:
            return self.timed.run(feeds)[self.plain.source.answer.output]
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            raise ModelError(
                f"the model fails on random inputs ({describe_shapes(feeds)}), but a server warms "
                "up with such inputs; export it with fixed sizes, except the batch. ONNX Runtime "
                f"says: {_line(error)}"
            ) from error


def _zeros(spec: TensorSpec, sizes: Mapping[str, int]) -> NDArray[Any]:
    shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in spec.shape]
    return np.zeros(shape, spec.dtype)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
