"""Sentences of the report: promise, warnings, headlines, facts, and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from offramp.bundle import Answer, Manifest, Measured, MeasuredSize, Profile, Ratio
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.records import ClassLoss, describe_harm, harmed, uncertified
from offramp.bundle.schema.manifest import Calibration
from offramp.calibration.rehearsal import Rehearsed
from offramp.certify import samples_needed
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.report import numbers
from offramp.compiler.report.figures import PolicyFigures
from offramp.engine.models.whole_promise import whole_policy

if TYPE_CHECKING:
    from offramp.compiler.graphs.weights import WeightSizes

_MOST_NAMED = 12
"""Largest number of classes that a sentence names."""
Fact: TypeAlias = tuple[str, str]
"""A fact's name and its value, as texts."""


class Headline(NamedTuple):
    """A large figure at the top of the report."""

    value: str
    means: str
    kind: str
    """Origin of the figure: predicted, measured, certified or counted."""


def summary(found: PolicyFigures) -> str:
    """Return a sentence on the savings that exits are predicted to have."""
    if not found.active:
        return "Every input runs through the whole unmodified model: nothing is saved."
    saved = found.predicted_savings
    return (
        f"{numbers.plural(len(found.active), 'exit')} in use "
        f"{'is' if len(found.active) == 1 else 'are'} predicted to "
        f"{'save' if saved >= 0 else 'COST'} {numbers.percent(abs(saved))} of the model's time; "
        f"{numbers.percent(float(found.shares[-1]))} of the certify split ran to the model's end."
    )


def promise(found: PolicyFigures) -> tuple[str, str] | None:
    """Return the certified promise, and how it was tested; ``None`` if nothing was certified."""
    made = found.policy.promise
    if made is None or not found.active:
        return None
    effect = found.manifest.batch_effect
    whole = whole_policy(found.policy, effect).promise or made
    task = found.manifest.answer.task
    unlike_model = "differ from those of the unmodified model"
    if task.kind != "classification":
        unlike_model = f"do not agree with the unmodified model's (they do where {task.describe()})"
    promised = (
        f"On inputs like the calibration data, at most "
        f"{numbers.plain_percent(whole.max_disagreement)} of the answers {unlike_model}: "
        f"certified with {numbers.plain_percent(whole.confidence_level)} "
        f"confidence on {numbers.plural(made.certify_samples, 'certify sample')} with "
        f"{numbers.plural(made.certify_errors, 'error')}."
    )
    promised = f"{promised} {distinct_samples(found.manifest.calibration)}".rstrip()
    bound = numbers.plain_percent(made.max_disagreement)
    unlike = "unmodified model's" if effect is None else "model's in a batch of the same size"
    tested = (
        f"An error is an answer unlike the {unlike}. Learn then Test: if more than "
        f"{bound} differed, so few errors would be seen with probability {made.p_value:.2g} at "
        f"most, below the {1 - made.confidence_level:.2g} allowed. Nothing is promised under "
        f"drift; that is watched while serving."
    )
    return promised, tested


def distinct_samples(data: Calibration, *, promised: bool = True) -> str:
    """Return a sentence on how many samples of a promise are distinct; empty if all are."""
    if data.distinct is None:
        return ""
    return (
        f"{'The promise rests' if promised else 'A promise would rest'} on "
        f"{data.certify_samples:,} distinct samples (of {data.distinct.samples:,}; "
        f"{data.distinct.describe()})."
    )


def class_bound(
    answer: Answer, losses: Sequence[ClassLoss], bound: float, confidence_level: float
) -> str:
    """Return a sentence on the classes that have a separate certified bound.

    Each bound is tested at ``confidence_level``.
    """
    few = uncertified(answer, losses, max_disagreement=bound, confidence_level=confidence_level)
    text = f"For each class separately, at most {numbers.plain_percent(bound)} is certified"
    if not few:
        return f"{text}."
    named = ", ".join(map(str, few[:_MOST_NAMED])) + (", …" if len(few) > _MOST_NAMED else "")
    needed = samples_needed(bound, confidence_level)
    which = numbers.plural(len(few), "class", "classes")
    return f"{text}, but not for {which} of fewer than {needed} certify samples: {named}."


def own_bounds(found: PolicyFigures) -> str:
    """Return :func:`class_bound` for the report's policy; empty if no class has a bound."""
    made = found.policy.promise
    if made is None or made.max_class_disagreement is None:
        return ""
    level = level_of_each(made.confidence_level, copies=found.certify.copies is not None)
    bound = made.max_class_disagreement
    return class_bound(found.manifest.answer, found.by_class, bound, level)


def harms(found: PolicyFigures) -> list[str]:
    """Return a sentence on each class that loses far more answers than the bound allows overall."""
    made = found.policy.promise
    if made is None or made.max_class_disagreement is not None:
        return []
    bound = made.max_disagreement
    return [f"Of {describe_harm(loss, bound)[3:]}." for loss in harmed(found.by_class, bound)]


def warning(
    found: PolicyFigures, limit: str | None = None, judged: SavingsCheck | None = None
) -> tuple[str, str] | None:
    """Return a warning and its remedy; ``None`` if there is no problem."""
    if found.manifest.calibration.random_inputs:
        return "Compiled on random inputs: nothing is certified.", (
            "This was a dry run, to see exits and times. Times are real; shares of answers, "
            "agreement and savings do not describe your data. Compile again on samples: "
            "eecompile MODEL --data DATA."
        )
    if judged is not None and (nothing := judged.warning):
        return "The exits in use save nothing on the machine that measured them.", nothing
    if found.active and found.policy.promise is None:
        remedy = "Compile again, or compare the agreement counted below with your own bound."
        why = f"Exits are in use, but nothing is promised about agreement. {remedy}"
        return "This policy was not certified.", why
    if found.active:
        return None
    title = "No exit is active: this bundle serves the unmodified model."
    if limit is not None:
        return title, f"{limit[0].upper()}{limit[1:]}."
    built = len(found.manifest.exits)
    why = "No exit was worth building: none saved more time on the tuning split than it cost."
    if built:
        one = "1 exit was" if built == 1 else f"{built} exits were"
        why = (
            f"{one} built, but no policy both saved time and kept disagreement within the "
            f"constraint with the confidence asked for."
        )
    remedy = "More data can certify more; a larger --max-disagreement allows more."
    return title, f"{why} {remedy}"


def headlines(found: PolicyFigures, judged: SavingsCheck | None = None) -> list[Headline]:
    """Return the few figures at the top of the report."""
    shown = []
    made, in_use = found.policy.promise, bool(found.active)
    if in_use:
        saved = numbers.percent(found.predicted_savings)
        shown.append(Headline(saved, "of the model's time saved", "predicted"))
    if judged is not None:
        means = f"of the model's time saved, batch {judged.at.batch_size}"
        shown.append(Headline(numbers.percent(judged.savings), means, "measured on this machine"))
    if in_use and made is not None:
        bound = f"≤\u202f{numbers.plain_percent(made.max_disagreement)}"
        level = f"disagreement, {numbers.plain_percent(made.confidence_level)} confidence"
        shown.append(Headline(bound, level, "certified"))
    if in_use:
        agreed = numbers.percent(1 - found.disagreement, 2)
        shown.append(Headline(agreed, "agreement, certify split", "counted"))
    chosen = f"{len(found.active)} of {len(found.manifest.exits)}"
    shown.append(Headline(chosen, "exits in use", "chosen"))
    source = found.manifest.calibration.source_accuracy
    if found.accuracy is not None and source is not None:
        means = f"accuracy; unmodified {numbers.percent(source, 2)}"
        if not in_use:
            means = "accuracy of the unmodified model"
        shown.append(Headline(numbers.percent(found.accuracy, 2), means, "counted"))
    return shown


def facts(
    found: PolicyFigures, rehearsed: Rehearsed | None, weights: WeightSizes | None = None
) -> list[tuple[str, list[Fact]]]:
    """Return the facts that the report's figures are based on, in groups."""
    manifest, data = found.manifest, found.manifest.calibration
    samples = [
        ("Training split", numbers.plural(data.train_samples, "sample")),
        ("Tuning split", numbers.plural(data.tune_samples, "sample")),
        ("Certify split", numbers.plural(data.certify_samples, "sample")),
        ("Data SHA-256", data.data_sha256),
    ]
    if data.distinct is not None:
        distinct = f"{data.distinct.samples:,} ({data.distinct.describe()})"
        samples.insert(3, ("Distinct samples", distinct))
    if data.source_accuracy is not None:
        accuracy = f"{numbers.percent(data.source_accuracy, 2)} (counted, certify split)"
        samples.insert(3, ("Unmodified accuracy", accuracy))
    if rehearsed is not None and rehearsed.data_sha256 != data.data_sha256:
        samples[-1] = ("Training data SHA-256", data.data_sha256)
        samples.append(("Tuned and certified on", rehearsed.data_sha256))
    begins = manifest.source_begins
    model = [
        ("Source", manifest.source.original_name),
        ("Source SHA-256", manifest.source.original_sha256),
        ("Opset", str(manifest.source.opset)),
        ("Segments", numbers.count(len(manifest.segments))),
        *([("Precision", precision(manifest))] if begins or manifest.precision_reason else []),
        *(("Input", tensor.describe()) for tensor in manifest.declared),
        *(("Output", tensor.describe()) for tensor in manifest.served_outputs),
        ("Answer", f"{manifest.answer.output}, {manifest.answer.describe()}"),
        *([("Values", data.describe_ranges())] if data.answer_ranges else []),
        ("Agreement", f"where {manifest.answer.task.describe()}"),
        ("Slicing verified to", f"{manifest.verified_tolerance:g} (relative)"),
        *([("Other batches", effect.describe())] if (effect := manifest.batch_effect) else []),
        *(("Other lengths", padding.describe()) for padding in manifest.paddings),
        *(("Legal values", bound.describe()) for bound in manifest.value_bounds),
        *([("Large weights", kept_once(weights))] if weights and weights.file_bytes else []),
        *(("Shared in memory", line) for line in shared_weights(manifest)),
    ]
    machine = [
        ("Profiled on", found.profile.device),
        ("Threads", str(found.profile.threads)),
        ("Batch sizes", ", ".join(map(str, found.profile.batch_sizes))),
        ("Reference batch", f"{found.reference} (of predicted savings)"),
        *_how_sure(found),
        *(("Disturbed", note) for note in found.profile.disturbed),
    ]
    tools = sorted(manifest.tools.items())
    return [("Model", model), ("Data", samples), ("Profile", machine), ("Tools", tools)]


def kept_once(weights: WeightSizes) -> str:
    """Return a text on large weights: their size in one file, and their size without that file."""
    return (
        f"{numbers.mebibytes(weights.file_bytes)} in {WEIGHTS}, each once; in every graph that has "
        f"them they would be {numbers.mebibytes(weights.graph_bytes)} (counted)"
    )


def shared_weights(manifest: Manifest) -> list[str]:
    """Return lines on the cost and gain of shared weights, for the model and each variant."""
    size = manifest.calibration.reference_batch_size
    names = ["the full model", *(variant.name for variant in manifest.variants)]
    return [
        f"{names[cost.variant]} at batch {size}: {cost.describe()}"
        for cost in manifest.weight_sharing
    ]


def precision(manifest: Manifest) -> str:
    """Return a bundle's precision, its meaning, and the reason for it."""
    means = f": {cascade(manifest)}" if manifest.source_begins else ""
    why = f". Chosen here: {manifest.precision_reason}" if manifest.precision_reason else ""
    return f"{manifest.precision}{means}{why}"


def cascade(manifest: Manifest) -> str:
    """Return a sentence on how a bundle with a copy of its model works."""
    front = numbers.plural(manifest.source_begins, "segment")
    copy = "a quantised copy"
    if manifest.training is not None:
        copy = f"a copy that was trained together with them ({manifest.training.describe()})"
    where = "" if manifest.cpu is None else f"; certified on a CPU of {manifest.cpu.describe()}"
    return (
        f"exits follow {front} of {copy}, whose own answer is the last exit; samples below "
        f"every threshold run through the whole unmodified float32 model{where}"
    )


def _how_sure(found: PolicyFigures) -> list[Fact]:
    """Return the uncertainty of times at the reference size, and the time that exits add."""
    rows = []
    if (spread := found.profile.spread) is not None:
        column = found.profile.column(found.reference)
        sure = numbers.plain_percent(round(spread.added[column], 4))
        known = f"what exits add is known to ±{sure} of the model's time (95 % interval)"
        rows.append(("Rounds", f"{spread.rounds[column]}; {known}"))
    if found.active:
        sizes = sorted({found.profile.batch_sizes[0], found.reference})
        added = ", ".join(f"{numbers.percent(found.cost(size).overhead(found.active))} at batch "
                          f"{size}" for size in sizes)  # fmt: skip
        rows.append(("Where nothing exits", f"the answer comes later by {added} (profiled)"))
    return rows


TOLERATED_DIFFERENCE = 0.05
"""Share of the model's time by which measured and predicted savings may differ without a note."""

_ALONE = 3
"""The report names a reason if a sample alone takes at least this multiple of its share of a full
batch's time. In the Fashion-MNIST example the multiple is 1.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsCheck:
    """Measured savings and their prediction, at the batch size nearest to the reference size."""

    measured: Measured
    at: MeasuredSize
    predicted_savings: float
    """Predicted saving as a share of the model's time, at the same batch size."""
    profile: Profile
    """Profile that the savings were predicted from."""

    @classmethod
    def of(cls, found: PolicyFigures, measured: Measured) -> SavingsCheck:
        """Create the comparison of a measurement with the prediction at the same batch size."""
        at = measured.nearest(found.reference)
        predicted = found.savings_at(at.batch_size)
        return cls(measured=measured, at=at, predicted_savings=predicted, profile=found.profile)

    @property
    def savings(self) -> float:
        """Measured saving as a share of the model's time."""
        return 1 - self.at.busy.value

    @property
    def difference(self) -> str | None:
        """Sentence on a difference between prediction and measurement; ``None`` if close."""
        apart = self.savings - self.predicted_savings
        if abs(apart) <= TOLERATED_DIFFERENCE:
            return None
        direction = "more" if apart > 0 else "less"
        points, reasons = f"{100 * abs(apart):.1f} points", "; ".join(_reasons(self))
        return (
            f"Measured savings are {points} {direction} than predicted. Likely reason: {reasons}."
        )

    @property
    def warning(self) -> str | None:
        """Sentence that the exits in use save no time; ``None`` if they save time."""
        if self.savings > 0:
            return None
        return (
            f"At batch {self.at.batch_size} the exits in use took {ratio(self.at.busy)} of the "
            f"unmodified model's time, though {self.predicted_savings:.1%} savings were "
            "predicted. Compile again on a quiet machine, or on the one that serves; eebench "
            "compare measures for longer."
        )

    def describe(self) -> str:
        """Return a sentence with predicted and measured savings."""
        return (
            f"Predicted savings {self.predicted_savings:.1%}, measured {self.savings:.1%} "
            f"±{self.at.busy.half_width:.1%} (batch {self.at.batch_size})."
        )


def measured_ratios(measured: Measured) -> str:
    """Return all measured ratios in one line of text."""
    sizes = "; ".join(
        f"batch {at.batch_size}: mean {at.mean.value:.2f}, median {at.median.value:.2f}, "
        f"busy {at.busy.value:.2f}, nothing exits {at.nothing_exits.value:.2f}"
        for at in measured.sizes
    )
    samples = numbers.plural(measured.samples, "sample")
    return f"Measured here on {samples}, as a ratio to the unmodified model: {sizes}."


def ratio(found: Ratio) -> str:
    """Return text such as ``0.31 ± 0.01``."""
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def _reasons(judged: SavingsCheck) -> list[str]:
    """Return possible reasons for the difference, the most likely first; never empty."""
    measured, at, profile = judged.measured, judged.at, judged.profile
    found = []
    fewer = judged.savings < judged.predicted_savings
    alone, full = (profile.source_ms[profile.column(size)] for size in (1, at.batch_size))
    if fewer and alone * at.batch_size > _ALONE * full:
        found.append(
            f"a batch of 1 takes {alone / full:.0%} of the time of one of {at.batch_size} in this "
            "model, so that a sample that leaves a batch saves less than its share"
        )
    if profile.disturbed:
        found.append("the machine was disturbed while the parts were profiled")
    if measured.disturbed:
        found.append("the machine was disturbed while this was measured")
    if at.busy.half_width > TOLERATED_DIFFERENCE:
        found.append(f"so short a run is accurate to ±{100 * at.busy.half_width:.1f} points only")
    if at.batch_size not in profile.batch_sizes:
        other = profile.batch_sizes[profile.column(at.batch_size)]
        found.append(f"batch {at.batch_size} was not profiled, batch {other} was used instead")
    if measured.threads != profile.threads:
        found.append(f"{measured.threads} threads were measured, {profile.threads} profiled")
    if not found and fewer and at.batch_size > 1:
        smaller = "samples that go on do so in smaller batches, which take longer a sample than "
        found = [f"{smaller}the full ones that the prediction counts"]
    last = "the parts take another time together than they took when they were profiled"
    return found or [last]
