"""Checks of engines: comparison with their graphs, and the effect of a precision on answers.

:class:`Verifier` compares engines with ONNX Runtime on the CPU. :func:`measure_precision` counts
how often answers in float16 or int8 differ from the float32 source model's. :func:`certify_engines`
certifies the thresholds again in the precision that will be served.

The effect of a precision is measured before any engine is built. A promise ("disagreement with the
source model stays within 1 %") was certified in float32; in float16 or int8 other samples leave
early, and some answers of the model itself differ. So the stages of the exit policy are run in that
precision, and the source model in float32, both in ONNX Runtime. There Q/DQ pairs are computed as
written, and float16 is imitated by :func:`~offramp.compiler.engines.halving.rounded`. TensorRT
rounds slightly differently in some places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy, Promise
from offramp.bundle.engine_index import PrecisionEvidence, addressed, model_digest
from offramp.bundle.engines import Precision
from offramp.bundle.records import CERTIFY
from offramp.bundle.schema.parts import outputs_after
from offramp.calibration.choose.exit_records import ExitRecords, dump_records, kept_records
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import BATCH_SIZE, run_over
from offramp.calibration.precision.quantization import RANGE_SAMPLES, Ranges
from offramp.certify.binomial import binomial_cdf, half_risk, upper_bound
from offramp.compiler.common.errors import EngineBuildError, VerificationError
from offramp.compiler.engines.halving import rounded
from offramp.compiler.engines.profiles import ModelShapes, Point, SizedProfile, bound
from offramp.compiler.engines.units import Unit, UnitGraphs
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.samples.grouping import groups_again, may_be_of
from offramp.engine.answers.agreement import Agreement, agreement_of
from offramp.engine.answers.differences import Scales, compare
from offramp.engine.answers.exit_check import confidence_of, exits
from offramp.engine.control.costs import CostModel
from offramp.engine.control.initial import certified_on
from offramp.engine.graphs.assembly import assemble
from offramp.engine.stages.plan import Mode, StageSpec, make_plan
from offramp.engine.tensorrt.lookup import TOLERANCES

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
Run: TypeAlias = Callable[[Tensors, int], Mapping[str, NDArray[Any]]]
"""Function that runs an engine once on inputs by name, with the profile at an index."""


class Verifier:
    """Compares engines of a bundle with their graphs, on inputs that the model could get.

    If a unit begins inside the model, its inputs are computed by the segments before it: random
    numbers would not be like the model's activations.
    """

    def __init__(
        self,
        bundle: Bundle,
        shapes: ModelShapes,
        precision: Precision,
        *,
        samples: Dataset | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare to check engines of one precision; without ``samples``, inputs are random."""
        self._bundle = bundle
        self._shapes = shapes
        self._tolerance = TOLERANCES[precision]
        self._samples = samples
        self._seed = seed
        self._source = onnx.load_from_string(bundle.read(bundle.manifest.source.file))

    def check(self, unit: Unit, graph: bytes, profiles: Sequence[SizedProfile], run: Run) -> float:
        """Run an engine at the largest and the smallest shapes of every profile.

        Returns the largest difference found, relative to each value's scale.

        Raises:
            EngineBuildError: An output is missing, has another type or shape, or differs beyond the
                tolerance; or the graph itself returns NaN or infinity, except the −infinity of
                masked values.
        """
        proto = onnx.load_from_string(rounded(graph))
        reads = [info.name for info in proto.graph.input]
        reference, prefix = GraphRunner(proto), self._prefix(unit)
        worst = 0.0
        for index, profile in enumerate(profiles):
            for point in dict.fromkeys([profile.sizes.best, profile.sizes.least]):
                inputs = self._values(prefix, point, reads)
                wanted, found = reference.run(inputs), run(inputs, index)
                where = f"profile {index}, {point.describe()}"
                worst = max(worst, self._compare(unit, wanted, found, where))
        return worst

    def inputs(self, unit: Unit, names: Iterable[str], point: Point) -> Tensors:
        """Return the named inputs of a unit, at the sizes of a point."""
        return self._values(self._prefix(unit), point, names)

    def _values(self, prefix: GraphRunner | None, point: Point, names: Iterable[str]) -> Tensors:
        feeds = self._feeds(point)
        values = {**feeds, **(prefix.run(feeds) if prefix else {})}
        return {name: values[name] for name in names}

    def _compare(self, unit: Unit, wanted: Tensors, found: Tensors, where: str) -> float:
        allowed = self._allowed(unit, wanted)
        worst = 0.0
        for name, value in wanted.items():
            if name not in found:
                raise EngineBuildError(f"the engine has no output {name!r} ({where})")
            actual = found[name]
            if actual.dtype == np.int32 and value.dtype == np.int64:
                actual = actual.astype(np.int64)  # TensorRT 8.6 has no 64-bit integers
            if (actual.dtype, actual.shape) != (value.dtype, value.shape):
                raise EngineBuildError(
                    f"output {name!r} of the engine is {actual.dtype} {list(actual.shape)}, but "
                    f"that of its graph is {value.dtype} {list(value.shape)} ({where})"
                )
            if np.isnan(value).any() or np.isposinf(value).any():
                raise EngineBuildError(
                    f"output {name!r} of the graph itself is not finite on a CPU ({where}); build "
                    "it with a finer --precision (tf32 or fp32) or use other --data"
                )
            difference = compare(actual, value)
            if not difference.share <= allowed[name]:
                raise EngineBuildError(
                    f"output {name!r} of the engine differs from ONNX Runtime's by "
                    f"{difference.describe()}; allowed are {allowed[name]:.1e} ({where}); please "
                    "report this with the versions of TensorRT and the driver"
                )
            worst = max(worst, difference.share)
        return worst

    def _allowed(self, unit: Unit, wanted: Tensors) -> dict[str, float]:
        """Return tolerances by output.

        An *absolute* error of logits becomes a *relative* error of their softmax, so the tolerance
        of confidences grows with the scale of the logits.
        """
        allowed = dict.fromkeys(wanted, self._tolerance)
        manifest = self._bundle.manifest
        if unit.exit is not None and manifest.answer.form != "probabilities":
            exit_ = manifest.exits[unit.exit]
            scale = Scales.of(wanted[exit_.output]).ordinary
            allowed[exit_.confidence] = self._tolerance * max(1.0, scale)
        return allowed

    def _prefix(self, unit: Unit) -> GraphRunner | None:
        segments = self._bundle.manifest.segments
        if not unit.first_segment:
            return None
        parts = [self._bundle.read(s.file) for s in segments[: unit.first_segment]]
        given = outputs_after(segments, 0, unit.first_segment - 1)
        return GraphRunner(onnx.load_from_string(assemble(parts, given)))

    def _feeds(self, point: Point) -> dict[str, NDArray[Any]]:
        """Return the model's inputs at a point: samples if they are large enough, else random."""
        shapes = self._shapes.inputs_at(point)
        if self._samples is not None:
            arrays = self._samples.take(np.arange(point.batch) % len(self._samples))
            cut = {n: a[tuple(slice(size) for size in shapes[n])] for n, a in arrays.items()}
            if all(cut[name].shape == shape for name, shape in shapes.items()):
                return cut
        return dict(random_inputs(bound(self._source, shapes), point.batch, seed=self._seed))


Verdict: TypeAlias = Literal["kept", "open", "broken"]

_RECOGNISED = 200
"""Number of samples by which a data split is recognised."""
OPSETS_AS_THEY_ARE = "10"
"""TensorRT version to make graphs for, so that no operator set is lowered: ONNX Runtime runs
them."""


class PrecisionData(NamedTuple):
    """Samples for setting a precision, and other samples for judging it."""

    ranges: Dataset
    tune: Dataset
    """Samples that thresholds are fitted on; samples of ``ranges`` may be among them."""
    judged: Dataset
    unseen: bool
    """True if, as far as is known, no head or threshold was fitted on ``judged``: the samples are
    the certify split, or not from the data of the compilation."""
    certifies: bool
    """True if ``tune`` and ``judged`` were recognised as the splits of the compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCheck:
    """Numbers of answers in a precision that differ from the float32 source model's answers."""

    precision: Precision
    samples: int
    """Number of samples that were run; the numbers below refer to all of them."""
    unseen: bool
    """True if nothing was fitted on these samples (see :class:`PrecisionData`)."""
    source_differs: int
    """Number of samples to which the source model in this precision, without exits, answers
    differently."""
    policy_differs: int
    """Number of samples to which the bundle's policy in this precision answers differently."""
    policy_differs_fp32: int
    """Number of samples to which the policy in float32 answers differently: the effect of exits
    alone."""
    promise: Promise | None
    """The bundle's promise, which was certified in float32."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the promise by exact binomial tests at its confidence level.

        ``kept``: these samples certify the promise in this precision. ``broken``: they disprove the
        promise. ``open``: they do neither. ``None``: there is no promise.
        """
        if self.promise is None:
            return None
        bound, alpha = self.promise.max_disagreement, 1 - self.promise.confidence_level
        if binomial_cdf(self.policy_differs, self.samples, bound) <= alpha:
            return "kept"
        as_many = 1 - binomial_cdf(self.policy_differs - 1, self.samples, bound)
        return "broken" if as_many <= alpha else "open"

    def describe(self) -> str:
        """Return one or two sentences for the command line."""
        counts = (self.source_differs, self.policy_differs, self.policy_differs_fp32)
        source, policy, plain = (f"{count / self.samples:.2%}" for count in counts)
        text = (
            f"{self.precision}: of {self.samples:,} samples the model answers {source} differently "
            f"than in fp32, and the policy with exits {policy} differently than the fp32 model "
            f"(in fp32: {plain})"
        )
        promise, verdict = self.promise, self.verdict
        if promise is not None and verdict is not None:
            most = upper_bound(self.policy_differs, self.samples, promise.confidence_level)
            promised = f"{promise.max_disagreement:.2%} at {promise.confidence_level:.0%}"
            said = {
                "kept": f"the promise ({promised}) holds",
                "open": f"the promise ({promised}) is neither certified nor disproved: at most "
                f"{most:.2%} at that confidence",
                "broken": f"the promise ({promised}) is broken",
            }
            text += f"; {said[verdict]}"
        seen = "" if self.unseen else " Some of these samples may have trained the exits."
        return f"{text}.{seen}"

    def demand(self) -> None:
        """Raise VerificationError if the promise is disproved."""
        if self.verdict == "broken":
            raise VerificationError(
                f"{self.describe()} Build with a finer --precision (fp16, tf32 or fp32), or add "
                "--accept-disagreement to serve it anyway"
            )


def part_data(
    bundle: Bundle, dataset: Dataset, *, seed: int = 0, threads: int = 1
) -> PrecisionData:
    """Split samples into those that set ranges and those that judge; DataError for fewer than two.

    If the bundle was compiled with this data, the certify split judges, because nothing was fitted
    on it. That split is found again with the seed of the compilation, and recognised by the source
    model's answers. Other data is split in halves by a seeded permutation. Such data counts as
    unseen, because no part of the bundle was made with it. Only one of several equal rows is used.
    """
    if len(dataset) < 2:
        raise DataError(f"{len(dataset)} samples are too few to measure and to judge; use 1,000")
    groups = groups_again(bundle.manifest, dataset)
    order = groups.shuffled(seed)
    made_with = bundle.manifest.calibration
    own = dataset.sha256 == made_with.data_sha256
    fitted = len(groups) - made_with.certify_samples
    trained = fitted - made_with.tune_samples
    if own and may_be_of(made_with, groups) and fitted > 0 and trained >= 0:
        judged = dataset.distinct(np.sort(order[fitted:]), groups)
        if _is_certify_split(bundle, judged, threads):
            ranges = dataset.subset(np.sort(order[:fitted][:RANGE_SAMPLES]))
            tune = dataset.distinct(np.sort(order[trained:fitted]), groups)
            return PrecisionData(ranges, tune, judged, unseen=True, certifies=True)
    half = max(len(order) // 2, 1)
    ranges = dataset.subset(np.sort(order[:half][:RANGE_SAMPLES]))
    tune, judged = (dataset.subset(np.sort(part)) for part in (order[:half], order[half:]))
    return PrecisionData(ranges, tune, judged, unseen=not own, certifies=False)


def measure_precision(
    bundle: Bundle,
    precision: Precision,
    ranges: Ranges | None,
    dataset: Dataset,
    *,
    unseen: bool,
    threads: int = 1,
) -> PrecisionCheck:
    """Run the source model and the policy's stages in a precision, and compare with float32.

    All samples are run four times. ``ranges``, for ``int8``, must have been measured on other
    samples than ``dataset``; ``unseen`` is as in :class:`PrecisionData`. DataError if the model
    fails on a sample.
    """
    graphs = UnitGraphs(bundle, precision, ranges=ranges, tensorrt_version=OPSETS_AS_THEY_ARE)
    plain = UnitGraphs(bundle, "fp32", tensorrt_version=OPSETS_AS_THEY_ARE)
    off, policy = (make_plan(bundle, mode=mode).stages for mode in (Mode.OFF, Mode.LEAVE))

    def judged(unit: Unit) -> bytes:
        return rounded(graphs.of(unit))

    agreement = agreement_of(bundle.manifest.answer)
    wanted = _answers(plain.of, off, dataset, agreement, threads)
    mask = agreement.mask_in(dataset.inputs)

    def differs(graph_of: Callable[[Unit], bytes], stages: Sequence[StageSpec]) -> int:
        found = _answers(graph_of, stages, dataset, agreement, threads)
        return int(np.count_nonzero(~agreement.agree(found, wanted, mask)))

    return PrecisionCheck(
        precision=precision,
        samples=len(dataset),
        unseen=unseen,
        source_differs=differs(judged, off),
        policy_differs=differs(judged, policy),
        policy_differs_fp32=differs(plain.of, policy),
        promise=bundle.policy.promise,
    )


def _answers(
    graph_of: Callable[[Unit], bytes],
    stages: Sequence[StageSpec],
    dataset: Dataset,
    agreement: Agreement,
    threads: int,
) -> NDArray[Any]:
    """Run stages on samples; return answers [samples, …], reduced to what is compared."""
    runners = stage_runners(graph_of, stages, threads)
    places, said = list[NDArray[np.intp]](), list[NDArray[Any]]()
    for start, batch in batches_of(dataset):
        with failing_from(dataset, start):
            for rows, answer in _leaving(stages, runners, batch):
                places.append(start + rows)
                said.append(agreement.reduce(answer))
    return np.concatenate(said)[np.argsort(np.concatenate(places))]


def stage_runners(
    graph_of: Callable[[Unit], bytes], stages: Sequence[StageSpec], threads: int
) -> list[GraphRunner]:
    """Load the graph of every stage."""
    graphs = [onnx.load_from_string(graph_of(Unit(*stage.unit))) for stage in stages]
    return [GraphRunner(graph, threads) for graph in graphs]


def batches_of(dataset: Dataset) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """Yield samples in batches, with the index of each batch's first sample."""
    for start in range(0, len(dataset), BATCH_SIZE):
        yield start, dataset.take(slice(start, start + BATCH_SIZE))


@contextmanager
def failing_from(dataset: Dataset, start: int) -> Iterator[None]:
    """Convert a model's failure on a batch into a DataError that names the samples."""
    try:
        yield
    except RuntimeError as error:
        raise DataError(
            f"the model fails on one of {BATCH_SIZE} samples from {dataset.rows[start]} on: {error}"
        ) from error


def _leaving(
    stages: Sequence[StageSpec], runners: Sequence[GraphRunner], tensors: dict[str, NDArray[Any]]
) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
    """Run one batch; yield the rows of the samples that leave at each stage, and their answers."""
    rows = np.arange(len(next(iter(tensors.values()))))
    for stage, runner in zip(stages, runners, strict=True):
        tensors = tensors | runner.run(tensors)
        if stage.answer is None:
            continue
        if stage.confidence is None:
            yield rows, tensors[stage.answer]
            return
        left = exits(tensors[stage.confidence], stage.threshold)
        yield rows[left], tensors[stage.answer][left]
        rows = rows[~left]
        if not len(rows):
            return
        tensors = {name: tensors[name][~left] for name in stage.carried}


def _is_certify_split(bundle: Bundle, judged: Dataset, threads: int) -> bool:
    """Return whether the source model's answers equal those recorded for the certify split.

    Only the first samples are compared.
    """
    records, manifest = bundle.records(), bundle.manifest
    said = records["final_prediction"][records["split"] == CERTIFY]
    if len(said) != len(judged):
        return False
    said = said[:_RECOGNISED]
    first, source = judged.subset(np.arange(len(said))), bundle.read(manifest.source.file)
    batches = run_over(source, [manifest.answer.output], first, threads=threads)
    agreement = agreement_of(manifest.answer)
    found = [agreement.codes(agreement.reduce(answer)) for _, (answer,) in batches]
    # Another machine may round differently; a random order of the samples differs far more often.
    return float((np.concatenate(found) == said).mean()) >= 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Recertified:
    """A policy whose exits were certified again in a precision."""

    precision: Precision
    evidence: PrecisionEvidence
    records: bytes
    """Content of the file with the evidence's records."""
    promise: Promise
    """The bundle's promise, which was certified in float32."""

    def describe(self) -> str:
        """Return one or two sentences for the command line."""
        evidence, promise = self.evidence, self.evidence.policy.promise
        spent = evidence.spent(evidence.confidence_level)
        text = (
            f"{self.precision}: of {evidence.samples:,} samples the model answers "
            f"{evidence.end_differs / evidence.samples:.2%} differently than in fp32, at most "
            f"{spent:.2%} of all, which is taken from the promise "
            f"({evidence.max_disagreement:.2%} at {evidence.confidence_level:.0%}). For exits "
            f"{evidence.max_disagreement - spent:.2%} are left"
        )
        if promise is None:
            return f"{text}: NONE CAN BE CERTIFIED, all samples will be answered at the end."
        return (
            f"{text}; certified again they are predicted to save "
            f"{promise.predicted_savings:.1%} of the time "
            f"(in fp32: {self.promise.predicted_savings:.1%})."
        )


def certify_engines(
    bundle: Bundle,
    precision: Precision,
    ranges: Ranges | None,
    parts: PrecisionData,
    *,
    threads: int = 1,
) -> Recertified:
    """Record all exits of a bundle in a precision, and certify those in use again.

    Samples of ``tune`` in ``parts`` are run once, samples of ``judged`` twice. The bundle must have
    a promise; ``ranges`` are for ``int8``.

    Raises:
        VerificationError: The model without exits may already use up the promise.
        DataError: The model fails on a sample.
    """
    record = recorder(bundle, precision, ranges, threads=threads)
    tune, certify = record(parts.tune), record(parts.judged)
    source = source_predictions(bundle, parts.judged, threads=threads)
    return share_promise(bundle, precision, tune, certify, source)


def recorder(
    bundle: Bundle, precision: Precision, ranges: Ranges | None, *, threads: int = 1
) -> Callable[[Dataset], ExitRecords]:
    """Return a function that records all exits and the model's end, in a precision."""
    graphs = UnitGraphs(bundle, precision, ranges=ranges, tensorrt_version=OPSETS_AS_THEY_ARE)
    active = tuple(ActiveExit(exit=e.index, threshold=NEVER) for e in bundle.manifest.exits)
    stages = make_plan(bundle, ExitPolicy(version=1, active=active), Mode.AUDIT).stages
    runners = stage_runners(lambda unit: rounded(graphs.of(unit)), stages, threads)
    return lambda dataset: _recorded(bundle, stages, runners, dataset)


def source_predictions(bundle: Bundle, dataset: Dataset, *, threads: int = 1) -> NDArray[np.int32]:
    """Return the codes [samples] of the float32 source model's answers."""
    plain = UnitGraphs(bundle, "fp32", tensorrt_version=OPSETS_AS_THEY_ARE)
    stages = make_plan(bundle, mode=Mode.OFF).stages
    runners = stage_runners(plain.of, stages, threads)
    return _recorded(bundle, stages, runners, dataset).final_prediction


def share_promise(
    bundle: Bundle,
    precision: Precision,
    tune: ExitRecords,
    certify: ExitRecords,
    source: NDArray[np.int32],
) -> Recertified:
    """Certify exits in a precision for the disagreement that the model's end leaves them.

    The precision changes some answers of the model's end; these count against the promise.
    ``source`` [certify samples] are the float32 model's answers. VerificationError if nothing
    remains for exits.
    """
    task = bundle.manifest.answer.task
    if task.is_relative:
        raise VerificationError(
            f"{precision}: answers of {task.kind} agree if they are near to each other, and the "
            "records do not show how the model's end in another precision affects that; build "
            "with --precision fp32, or add --accept-disagreement to serve it anyway"
        )
    promise, calibration = bundle.policy.promise, bundle.manifest.calibration
    assert promise is not None, "there is nothing to certify"
    if promise.max_class_disagreement is not None:
        raise VerificationError(
            f"{precision}: the bundle promises at most {promise.max_class_disagreement:.2%} for "
            "each class, but the effect of the model's end in another precision is not certified "
            "by class; build with --precision fp32, or compile without --max-class-disagreement"
        )
    differs = int(np.count_nonzero(certify.final_prediction != source))
    samples, level = len(source), promise.confidence_level
    spent = upper_bound(differs, samples, half_risk(level))
    if spent >= promise.max_disagreement:
        raise VerificationError(
            f"{precision}: of {samples:,} samples the model answers {differs / samples:.2%} "
            f"differently than in fp32, so up to {spent:.2%} of all answers may differ, at "
            f"{half_risk(level):.1%} confidence: that alone spends the promise "
            f"({promise.max_disagreement:.2%} at {level:.0%}), without any exit. Build with a "
            "finer --precision (fp16, tf32 or fp32), add more --data, or add "
            "--accept-disagreement to serve it anyway"
        )
    policy = certified_on(
        [active.exit for active in bundle.policy.active],
        CostModel.of(bundle.manifest, bundle.profile(), calibration.reference_batch_size),
        kept_records(tune, certify),
        max_disagreement=promise.max_disagreement - spent,
        confidence_level=half_risk(level),
    )
    records = dump_records(tune, certify)
    evidence = PrecisionEvidence(
        model=model_digest(bundle.manifest),
        policy=replace(policy, version=bundle.policy.version),
        records=addressed("records", records, ".npz"),
        samples=samples,
        end_differs=differs,
        max_disagreement=promise.max_disagreement,
        confidence_level=level,
    )
    return Recertified(precision=precision, evidence=evidence, records=records, promise=promise)


def _recorded(
    bundle: Bundle, stages: Sequence[StageSpec], runners: Sequence[GraphRunner], dataset: Dataset
) -> ExitRecords:
    """Run all samples through all stages, and record every exit's answers; no sample leaves."""
    exits, samples = len(bundle.manifest.exits), len(dataset)
    found = ExitRecords(
        confidence=np.zeros((exits, samples), np.float32),
        prediction=np.zeros((exits, samples), np.int32),
        final_prediction=np.zeros(samples, np.int32),
        final_confidence=np.zeros(samples, np.float32),
        labels=dataset.labels,
        copies=dataset.copies,
    )
    form, task = bundle.manifest.answer.form, bundle.manifest.answer.task
    agreement = agreement_of(bundle.manifest.answer)
    for start, batch in batches_of(dataset):
        said: dict[int, NDArray[Any]] = {}
        tensors, rows = batch, slice(start, start + len(next(iter(batch.values()))))
        for stage, runner in zip(stages, runners, strict=True):
            with failing_from(dataset, start):
                tensors = tensors | runner.run(tensors)
            if stage.answer is None:
                continue
            answer = tensors[stage.answer]
            if stage.confidence is None:
                ends, mask = agreement.reduce(answer), agreement.mask_in(batch)
                found.final_prediction[rows] = agreement.codes(ends)
                found.final_confidence[rows] = confidence_of(answer, form, task)
                for place, ours in said.items():
                    found.prediction[place, rows] = agreement.codes_against(ours, ends, mask)
                continue
            said[stage.answered_by] = agreement.reduce(answer)
            found.confidence[stage.answered_by, rows] = np.fmax(tensors[stage.confidence], 0)
    return found
