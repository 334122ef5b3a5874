"""What the report says in sentences: the promise, the warning, headline figures and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from offramp.calibration.limits import Limit
from offramp.calibration.rehearsal import Rehearsed
from offramp.compiler.report import numbers
from offramp.compiler.report.analysis import Analysis
from offramp.compiler.report.measured import Judged
from offramp.compiler.report.measured import warning as no_savings

Fact: TypeAlias = tuple[str, str]
"""A name and what is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A large figure."""

    value: str
    means: str
    kind: str
    """How it came to be: predicted, measured, certified, counted."""


def summary(found: Analysis) -> str:
    """Say in one sentence what the exits are predicted to bring."""
    model = numbers.percent(float(found.shares[-1]))
    exits = numbers.plural(len(found.active), "exit")
    saved = found.predicted_savings
    predicted = numbers.percent(abs(saved))
    if not found.active:
        return "Every input runs through the whole unmodified model: nothing is saved."
    verb = "save" if saved >= 0 else "COST"
    return (
        f"{exits} in use {'is' if len(found.active) == 1 else 'are'} predicted to {verb} "
        f"{predicted} of the model's time; {model} of the certify split ran to the model's end."
    )


def promise(found: Analysis) -> str | None:
    """Say what was certified, in plain words; ``None`` where nothing was."""
    made = found.policy.promise
    if made is None or not found.active:
        return None
    return (
        f"On inputs like the calibration data, at most "
        f"{numbers.plain_percent(made.max_disagreement)} of the answers differ from those of the "
        f"unmodified model: certified with {numbers.plain_percent(made.confidence)} confidence on "
        f"{numbers.plural(made.certify_samples, 'certify sample')} with "
        f"{numbers.plural(made.certify_errors, 'error')}."
    )


def promise_notes(found: Analysis) -> str | None:
    """Say how the promise was tested, and where it ends."""
    made = found.policy.promise
    if made is None or not found.active:
        return None
    return (
        f"An error is an answer unlike the unmodified model's. Learn then Test: if more than "
        f"{numbers.plain_percent(made.max_disagreement)} differed, so few errors would be seen "
        f"with probability {made.p_value:.2g} at most, below the "
        f"{1 - made.confidence:.2g} allowed. Nothing is promised under drift; that is watched "
        f"while serving."
    )


def warning(
    found: Analysis, limit: Limit | None = None, judged: Judged | None = None
) -> tuple[str, str] | None:
    """Say loudly what is wrong, and what to do; ``None`` if all is well."""
    if judged is not None and (nothing := no_savings(judged)):
        return "The exits in use save nothing on the machine that measured them.", nothing
    if found.active and found.policy.promise is None:
        remedy = "Compile again, or hold the agreement counted below against your own bound."
        why = f"Exits are in use, but nothing is promised about agreement. {remedy}"
        return "This policy was not certified.", why
    if found.active:
        return None
    title = "No exit is active: this bundle serves the unmodified model."
    if limit is not None:
        return title, f"{limit.message[0].upper()}{limit.message[1:]}."
    built = len(found.manifest.exits)
    if not built:
        why = "No exit was worth building: none saved more time on the tuning split than it cost."
    else:
        one = "1 exit was" if built == 1 else f"{built} exits were"
        why = (
            f"{one} built, but no policy both saved time and kept disagreement within the "
            f"constraint with the confidence asked for."
        )
    remedy = "More data can certify more; a larger --max-disagreement allows more."
    return title, f"{why} {remedy}"


def headlines(found: Analysis, judged: Judged | None = None) -> list[Headline]:
    """Pick the few figures that come first."""
    shown = []
    made = found.policy.promise
    built = len(found.manifest.exits)
    if found.active:
        saved = numbers.percent(found.predicted_savings)
        shown.append(Headline(value=saved, means="of the model's time saved", kind="predicted"))
    if judged is not None:
        means = f"of the model's time saved, batch {judged.at.batch_size}"
        saved = numbers.percent(judged.savings)
        shown.append(Headline(value=saved, means=means, kind="measured on this machine"))
    if found.active and made is not None:
        bound = f"≤\u202f{numbers.plain_percent(made.max_disagreement)}"
        level = f"disagreement, {numbers.plain_percent(made.confidence)} confidence"
        shown.append(Headline(value=bound, means=level, kind="certified"))
    if found.active:
        agreed = numbers.percent(1 - found.disagreement, 2)
        shown.append(Headline(value=agreed, means="agreement, certify split", kind="counted"))
    in_use = f"{len(found.active)} of {built}"
    shown.append(Headline(value=in_use, means="exits in use", kind="chosen"))
    source = found.manifest.calibration.source_accuracy
    if found.accuracy is not None and source is not None:
        means = f"accuracy; unmodified {numbers.percent(source, 2)}"
        if not found.active:
            means = "accuracy of the unmodified model"
        value = numbers.percent(found.accuracy, 2)
        shown.append(Headline(value=value, means=means, kind="counted"))
    return shown


def facts(found: Analysis, rehearsed: Rehearsed | None) -> list[tuple[str, list[Fact]]]:
    """Give what the figures rest on, in groups."""
    manifest, data = found.manifest, found.manifest.calibration
    sizes = ", ".join(map(str, found.profile.batch_sizes))
    samples = [
        ("Training split", numbers.plural(data.train_samples, "sample")),
        ("Tuning split", numbers.plural(data.tune_samples, "sample")),
        ("Certify split", numbers.plural(data.certify_samples, "sample")),
        ("Data SHA-256", data.data_sha256),
    ]
    if data.source_accuracy is not None:
        accuracy = f"{numbers.percent(data.source_accuracy, 2)} (counted, certify split)"
        samples.insert(3, ("Unmodified accuracy", accuracy))
    if rehearsed is not None and rehearsed.data_sha256 != data.data_sha256:
        samples[-1] = ("Training data SHA-256", data.data_sha256)
        samples.append(("Tuned and certified on", rehearsed.data_sha256))
    model = [
        ("Source", manifest.source.original_name),
        ("Source SHA-256", manifest.source.original_sha256),
        ("Opset", str(manifest.source.opset)),
        ("Segments", numbers.count(len(manifest.segments))),
        *(("Input", tensor.describe()) for tensor in manifest.inputs),
        *(("Output", tensor.describe()) for tensor in manifest.outputs),
        ("Answer", f"{manifest.answer.output}, {manifest.answer.classes} {manifest.answer.form}"),
        ("Slicing verified to", f"{manifest.verified_tolerance:g} (relative)"),
    ]
    machine = [
        ("Profiled on", found.profile.device),
        ("Threads", str(found.profile.threads)),
        ("Batch sizes", sizes),
        ("Reference batch", f"{found.reference} (of predicted savings)"),
        *_how_sure(found),
        *(("Disturbed", note) for note in found.profile.disturbed),
    ]
    return [
        ("Model", model),
        ("Data", samples),
        ("Profile", machine),
        ("Tools", sorted(manifest.tools.items())),
    ]


def _how_sure(found: Analysis) -> list[Fact]:
    """The spread at the reference batch size, and what is paid where nothing exits."""
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
