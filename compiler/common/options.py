"""What a user can ask of ``eecompile``, and which options exclude or need each other.

The tables of combinations hold for every model. Options that a certain model excludes are refused
once it is read (:mod:`offramp.compiler.steps.settling`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

from offramp.bundle import AnswerTask, TaskKind
from offramp.bundle.files import check_writable
from offramp.bundle.schema.answers import DENSE, IN_GRAPH
from offramp.bundle.schema.compilation import COPIES_WITHIN, Teacher
from offramp.bundle.writing import check_target
from offramp.calibration.data.data_sources import DataSource
from offramp.calibration.data.training_options import TrainingOptions
from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.compiler.common.errors import ModelError, OptionsConflictError
from offramp.compiler.data.made import RandomSource
from offramp.compiler.data.reading_options import OPTIONS
from offramp.engine.answers.criteria import CriterionError, known_criterion
from offramp.engine.models.options import MOST_SHARE, refuse_unless

AskedKind: TypeAlias = TaskKind | Literal["auto"]
SHARES: Final[dict[TaskKind, float]] = {"token-classification": 0.98, "segmentation": 0.95}
"""Least shares of equal tokens and pixels, where none is asked for; of key points it is all.

Pixels at the borders of objects come out one way or the other, however good the model: where two
answers to an image differ in 5 % of its pixels, either is about as right.
"""
WITHIN_SPREAD: Final = 0.1
"""How far values may differ where nothing is asked for: as a share of their standard deviation."""
WITHIN_MAP: Final = 0.05
"""How far key points may be apart, as a share of the map's longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTask:
    """What the user says of the task; ``None`` is as the task has it."""

    kind: AskedKind = "auto"
    share: float | None = None
    within: float | None = None
    class_map: bool = False
    """Answer with the classes of pixels or tokens in place of their scores."""

    def settle(self, kind: TaskKind) -> AnswerTask:
        """Give the task of a kind; ModelError where what is asked for says nothing of it."""
        share, within = self.share, self.within
        if share is not None and kind not in DENSE:
            raise ModelError(
                f"--agree-share {share:g} says nothing of {kind}, whose answers have no tokens, "
                "pixels or key points; leave it out"
            )
        if within is not None and kind not in ("pose", "regression"):
            raise ModelError(
                f"--agree-within {within:g} says nothing of {kind}, where classes are equal or "
                "not; leave it out"
            )
        return AnswerTask(
            kind=kind,
            share=SHARES.get(kind, 1.0) if share is None else share,
            within=(WITHIN_MAP if kind == "pose" else 0.0) if within is None else within,
        )


class VariantSource(Protocol):
    """Makes variants of the model that is compiled."""

    @property
    def flag(self) -> str:
        """The option that asks for it."""
        ...

    @property
    def combinations(self) -> Sequence[Illegal]:
        """Combinations of it with other options that are refused."""
        ...

    def prepare(self, model: Any) -> Any:
        """Return a :class:`.VariantFinder` of a :class:`.SourceModel`; CompileError."""
        ...


SEEDS = 2**63
"""Number of possible seeds: torch takes no larger one, numpy no negative one."""
_INF = float("inf")
_A_SHARE = "a share above 0 and below 1"
_FROM_0 = "a share from 0, and below 1"
DEFAULT_CONFIDENCE_LEVEL = 0.95
"""Of a promise, where nothing else is asked for or promised."""
Selection: TypeAlias = Literal["savings", "pame"]
"""How the exits in use are chosen among those that were built."""
AskedPrecision: TypeAlias = Literal["fp32", "int8", "auto"]
"""What ``eecompile --precision`` takes for bundles."""
Training: TypeAlias = Literal["frozen", "joint"]
"""What is trained: exits on the model as it is, or then a copy of it together with them."""
HeadFamily: TypeAlias = Literal["auto", "pooled", "bridges", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """How the model is read, and what its answers are."""

    answer: str | None = None
    """The output that exits imitate, where the model has several."""
    task: AskedKind = "auto"
    """What answers are; ``auto`` infers it from the graph."""
    agree_share: float | None = None
    """Least share of tokens, pixels or key points that have to be equal for an answer to agree."""
    agree_within: float | None = None
    """How far values may differ, or key points be apart (as a share of the map's longer side)."""
    class_map: bool = False
    """Answer with the classes of pixels or tokens, in a byte each, in place of their scores."""
    answer_tokens: tuple[int, ...] = ()
    """Ids of the tokens that a decoder [batch, tokens, vocabulary] answers with, as classes; the
    model is reduced to their logits behind the last token of the prompt."""
    max_cut_tensors: int = 4
    """Most tensors that a cut point has, where no single one carries everything."""
    simplify: bool = True
    simplify_limit: float = 180.0
    """Seconds that simplifying may take; the model is compiled as it is where that does not do."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= 1, "above 0, and at most 1", "agree_share")
        refuse_unless(self, lambda v: 0 <= v < _INF, "0 or more", "agree_within")
        refuse_unless(self, lambda v: v >= 1, "at least 1", "max_cut_tensors")
        refuse_unless(self, lambda v: 0 < v < _INF, "above 0", "simplify_limit")

    @property
    def asked_task(self) -> AskedTask:
        """What is said of the task."""
        return AskedTask(
            kind=self.task,
            share=self.agree_share,
            within=self.agree_within,
            class_map=self.class_map,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOptions:
    """What is promised of answers, and which samples are evidence."""

    max_disagreement: float = 0.01
    max_class_disagreement: float | None = None
    """Bound on the answers of each class of the model's by itself; ``None`` bounds none."""
    confidence_level: float = DEFAULT_CONFIDENCE_LEVEL
    group: str | None = None
    """Array of the data whose equal values say which samples belong together."""
    copies_within: float = COPIES_WITHIN
    """Share of the typical distance between samples within which they may be copies; 0 takes equal
    samples alone as copies, and no rows as a series."""

    def __post_init__(self) -> None:
        shares = ("max_disagreement", "max_class_disagreement", "confidence_level")
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, *shares)
        refuse_unless(self, lambda v: 0 <= v < 1, _FROM_0, "copies_within")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOptions:
    """Where exits are built, what they are, and how they learn."""

    exits: tuple[str, ...] = ()
    """Cut points to build exits at (:class:`offramp.compiler.ExitRule`); empty chooses
    ``candidates``."""
    candidates: int = 12
    """Most exits that are built."""
    heads: HeadFamily = "auto"
    """``pooled``: heads that pool their cut tensor; ``bridges``: the model's own blocks and head
    (PAME 5.1); ``both``: at each candidate what nets more; ``auto``: bridges where answers have
    places, else pooled ones."""
    criterion: str = "probability"
    """What says how sure an exit is: a name of :class:`.Criterion`, or a registered
    one (:mod:`offramp.engine.answers.criteria`). For classification."""
    mask: str | None = None
    """The graph input that says which tokens count; found by name where not given."""
    augment: Literal["auto", "off"] = "auto"
    """``auto``: heads train on made samples too, where a way to make them fits the inputs
    (:mod:`offramp.calibration.data.augmentation`)."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: v >= 1, "at least 1", "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """The copy of the model that exits may follow: of which precision, or how it is trained."""

    precision: AskedPrecision = "fp32"
    """``int8``: exits follow a quantised copy of the model, whose own answer is the last of them;
    whoever is sure enough at none runs through the unmodified model. Where that brings nothing on
    this machine it is fp32, with a warning; ``auto`` is the same without."""
    train: Training = "frozen"
    """``joint``: a copy of the model learns together with its exits (PAME 5.2), and is used where
    it saves more; its own answer is the last exit, and the unmodified model answers the rest."""
    teach: Teacher = "model"
    """What it learns: the unmodified model's answers, or the data's labels."""
    joint_rate: float = 1e-4
    """Its learning rate, at the peak."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "joint_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """How the exits in use are chosen among those that were built."""

    selection: Selection = "savings"
    """``savings``: what is expected to save most time. ``pame``: what a rehearsal on
    batches of the tuning split finds, which keeps batches from becoming late."""
    max_overhead: float | None = None
    """Share of the source model's time that exits (and the quantised model before the source, where
    there is one) may add for a sample that takes none
    (Apparate's ramp budget), at the reference batch size, where the measurement is sure of it.
    ``None`` is no limit: what exits add is a price in the savings. With ``savings`` only."""
    rehearsal_batch: int = 32
    """Rows of a rehearsed batch. With ``pame`` only."""
    max_violations: float = 0.02
    """Largest share of batches that an exit may make late. With ``pame`` only."""
    min_gain: float = 0.01
    """Least share of the source model's time that each exit must take off the mean latency; PAME
    has no such limit, which is 0. With ``pame`` only."""
    reference_batch_size: int = 8
    """Savings are predicted with the times profiled at this batch size."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "max_overhead")
        refuse_unless(self, lambda v: 0 <= v < 1, _FROM_0, "max_violations", "min_gain")
        sizes = ("rehearsal_batch", "reference_batch_size")
        refuse_unless(self, lambda v: v >= 1, "at least 1", *sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """One run of ``eecompile``."""

    model: Path
    data: Path | DataSource
    """Calibration data; a path is that of an npz file or of a folder of npy files."""
    output: Path
    overwrite: bool = False
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    promise: PromiseOptions = field(default_factory=PromiseOptions)
    building: ExitOptions = field(default_factory=ExitOptions)
    copy: CopyOptions = field(default_factory=CopyOptions)
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    tolerance: float | None = None
    """Largest relative difference between chained segments and source; ``None`` is by the precision
    that the source computes in (:mod:`offramp.compiler.common.rounding`)."""
    threads: int = 1
    """Of ONNX Runtime while profiling."""
    seed: int = 0
    variants: VariantSource | None = None
    """What makes smaller variants of the model, each with exits of its own."""
    scratch: Path | None = None
    """The folder that features are recorded in; ``None`` is the system's for temporary files."""
    scratch_limit: float = 4.0
    """GiB that features may take at once: the rest is recorded in later passes over the data."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "tolerance")
        refuse_unless(self, lambda v: v >= 1, "at least 1", "threads")
        refuse_unless(self, lambda v: 0 < v < _INF, "above 0", "scratch_limit")
        refuse_unless(self, lambda v: 0 <= v < SEEDS, f"from 0 to {SEEDS - 1}", "seed")

    @classmethod
    def of(cls, **named: Any) -> CompileOptions:
        """Make options of flat names, as flags and keyword arguments have them.

        TypeError if there is no such option, ValueError if a value is out of range.
        """
        groups = {
            group: kind(**{f.name: named.pop(f.name) for f in fields(kind) if f.name in named})
            for group, kind in _GROUPS.items()
        }
        return cls(**named, **groups)

    @classmethod
    def names(cls) -> set[str]:
        """Return the flat names of all options."""
        return {f.name for kind in (cls, *_GROUPS.values()) for f in fields(kind)} - _GROUPS.keys()

    def named(self, name: str) -> Any:
        """Return an option by its flat name."""
        owner = next(
            (g for g, kind in _GROUPS.items() if name in {f.name for f in fields(kind)}), None
        )
        return getattr(self if owner is None else getattr(self, owner), name)

    @property
    def is_dry_run(self) -> bool:
        """Whether the data are made inputs, which certify nothing."""
        return isinstance(self.data, RandomSource)


_GROUPS: Final[dict[str, Any]] = {
    "reading": ReadingOptions,
    "promise": PromiseOptions,
    "building": ExitOptions,
    "copy": CopyOptions,
    "choice": ChoiceOptions,
}
"""Groups of options by their field of :class:`CompileOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions:
    """A run of a subcommand that reads a bundle, and writes it again with something changed."""

    bundle: Path
    output: Path | None = None
    """``None`` replaces the bundle."""
    overwrite: bool = False
    """Whether ``output`` may replace another bundle."""
    dry_run: bool = False
    """Write nothing."""

    def target(self) -> Path | None:
        """Find where to write, and check that it is free; ``None`` in a dry run."""
        if self.dry_run:
            return None
        if self.output is None:
            target = self.bundle.resolve()  # a link to the bundle stays one
            check_writable(target)
            return target
        check_target(self.output, overwrite=self.overwrite)
        return self.output

    @property
    def replaces(self) -> bool:
        """Whether a bundle at the target is replaced."""
        return self.output is None or self.overwrite


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(RewriteOptions):
    """One run of ``eecompile profile``."""

    threads: int | None = None
    """Of ONNX Runtime; ``None`` is as the bundle was profiled."""
    backend: str = "onnxruntime"
    """What is measured: the CPU, or ``tensorrt`` or ``cuda`` on a GPU."""
    device: str = "cuda:0"
    """The GPU."""
    json: Path | None = None
    """A file to write the profile to alone; the bundle stays as it is then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions(RewriteOptions):
    """One run of ``eecompile rehearse``; ``None`` is what the bundle was made with."""

    data: Path | DataSource
    group: str | None = None
    copies_within: float | None = None
    anew: bool = False
    """Search the exits from scratch instead of adapting the policy."""
    max_disagreement: float | None = None
    max_class_disagreement: float | None = None
    confidence_level: float | None = None
    rehearsal_batch: int | None = None
    max_violations: float | None = None
    min_gain: float | None = None
    """Of a search only."""
    seed: int = 0


def depends_on_earlier(values: Mapping[str, object]) -> bool:
    """Whether the criterion looks at earlier exits."""
    try:
        return known_criterion(str(values["--criterion"])).depends_on_earlier
    except CriterionError:  # refused by itself
        return False


def _is_not_probability(values: Mapping[str, object]) -> bool:
    return values["--criterion"] != "probability"


def _is_learned_or_depends(values: Mapping[str, object]) -> bool:
    return values["--criterion"] == "learned" or depends_on_earlier(values)


def _is_on_host(values: Mapping[str, object]) -> bool:
    return values["--criterion"] not in IN_GRAPH


_READING: Final = tuple(
    Illegal(option=flag, without="--data",
            why="it says how data are read; leave it out, or add --data")
    for flag in ("--preprocessing", *(option.flag for option in OPTIONS))
)  # fmt: skip
_ONE_MODEL = "it is for exits of the float32 model as it is; take probability, entropy or margin"
_UNCERTIFIED = "nothing is certified on made inputs; leave it out, or give samples"
NO_ENGINES: Final = (
    Illegal(option="--criterion", beside="--backend tensorrt", when=_is_on_host,
            why="the host computes this criterion, which is for CPUs; choose probability, "
            "entropy, margin or learned, or --backend onnxruntime"),
    Illegal(option="--train joint", beside="--backend tensorrt",
            why="a bundle with a copy of the model is for ONNX Runtime; leave one of them out"),
    Illegal(option="--precision int8|auto", beside="--backend tensorrt",
            why="the int8 copy is for CPUs, and engines are made of a float32 bundle; compile "
            "without --precision, then eecompile build --precision int8 or auto"),
    Illegal(option="--custom-ops", beside="--backend tensorrt",
            why="TensorRT's engines cannot hold operators of a library; choose --backend "
            "onnxruntime, for serving too"),
)  # fmt: skip
"""Options of a bundle that has no engines: ``--backend auto`` builds none then."""
COMPILE: Final[tuple[Illegal, ...]] = (
    *NO_ENGINES,
    *_READING,
    Illegal(option="--criterion", beside="--heads bridges|both", when=_is_not_probability,
            why="criteria are for pooled heads; leave one of them out"),
    Illegal(option="--criterion", beside="--precision int8|auto", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", beside="--train joint", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", beside="--selection pame", when=depends_on_earlier,
            why="all exits have to run for this criterion, and pame takes single ones; leave one "
            "of them out"),
    Illegal(option="--heads bridges|both", beside="--precision int8|auto",
            why="bridges are for float32; leave one of them out"),
    Illegal(option="--train joint", beside="--precision int8|auto",
            why="a bundle has one copy of the model; leave one of them out"),
    Illegal(option="--train joint", beside="--class-map",
            why="joint training learns scores, and classes alone have none; leave one of them out"),
    Illegal(option="--teach labels", without="--train joint",
            why="only the copy of the model learns from labels; add it, or leave this out"),
    Illegal(option="--joint-rate", without="--train joint",
            why="it is the learning rate of the copy; add --train joint, or leave this out"),
    Illegal(option="--max-overhead", beside="--selection pame",
            why="pame bounds late batches instead; use --max-violations, or leave --selection "
            "out"),
    Illegal(option="--rehearsal-batch", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--max-violations", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--min-gain", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--candidates", beside="--exits",
            why="--exits names all places; leave one of them out"),
    Illegal(option="--simplify-limit", beside="--no-simplify",
            why="onnxslim does not run; leave one of them out"),
    *(Illegal(option=option, beside="--data random", why=_UNCERTIFIED)
      for option in ("--max-disagreement", "--confidence", "--max-class-disagreement", "--group",
                     "--copies-within", "--teach labels")),
)  # fmt: skip
_AS_THERE = "the engines that are there say it; leave one of them out"
_KEPT = "auto keeps what is certified; leave one of them out"
PROFILE: Final = (
    Illegal(option="--backend tensorrt|cuda", without="--json",
            why="a bundle's own profile is of a CPU; give a file, for a cluster file to name"),
    Illegal(option="--device", without="--backend tensorrt|cuda",
            why="the CPU is measured; leave it out, or choose one of these"),
    Illegal(option="--threads", beside="--backend tensorrt|cuda",
            why="a GPU is measured; leave it out"),
    *(Illegal(option="--json", beside=other, why="the bundle stays as it is; leave one of them out")
      for other in ("--output", "--overwrite", "--dry-run")),
)  # fmt: skip
BUILD: Final = (
    *_READING,
    Illegal(option="--units", beside="--parts",
            why="both choose what is built; leave one of them out"),
    *(Illegal(option="--beside-serving", beside=other, why=_AS_THERE)
      for other in ("--batch-profiles", "--buckets", "--workspace", "--optimization-level")),
    Illegal(option="--precision auto", beside="--dry-run",
            why="what is built is known once engines have been timed; leave one of them out"),
    Illegal(option="--precision auto", beside="--beside-serving",
            why="a server keeps the precision that it began with; give that precision"),
    Illegal(option="--precision auto", beside="--accept-disagreement", why=_KEPT),
    Illegal(option="--precision auto", beside="--units",
            why="engines of all stages are timed; leave one of them out"),
    Illegal(option="--precision auto", beside="--parts",
            when=lambda values: not {"source", "stages"} <= {*str(values["--parts"]).split(",")},
            why="engines of source and stages are timed; name both, or leave --parts out"),
    Illegal(option="--precision int8", without="--data",
            why="the ranges of activations are measured on calibration data; give that which the "
            "bundle was compiled with"),
)  # fmt: skip
EXPORT: Final = (
    *_READING,
    Illegal(option="--kserve", without="--triton",
            why="KServe runs Triton on its repository; add --triton DIR"),
    Illegal(option="--name", without="--triton", when=lambda values: values["--ovms"] is None,
            why="it is the model's name in a repository; add --triton DIR, or --ovms DIR"),
)  # fmt: skip


def check_options(options: CompileOptions) -> None:
    """Refuse combinations of options that come from Python, by an OptionsConflictError.

    An option counts as given where it differs from its default.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in CompileOptions.names()}
    flags["confidence_level"] = "--confidence"
    if options.variants is not None:
        flags["variants"] = options.variants.flag
    default = CompileOptions(model=Path(), data=Path(), output=Path())
    values = {flag: options.named(name) for name, flag in flags.items()}
    given = {
        flag
        for name, flag in flags.items()
        if name in ("model", "data", "output") or options.named(name) != default.named(name)
    }
    source, table = options.variants, COMPILE
    if source is not None:
        table += tuple(source.combinations)
    try:
        refuse_illegal(table, values, given)
    except IllegalCombinationError as error:
        raise OptionsConflictError(str(error)) from error
