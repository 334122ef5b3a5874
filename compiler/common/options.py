"""Options of ``eecompile``, and tables of options that exclude or need each other.

The tables are valid for every model. Options that a particular model excludes are refused once it
is read (:mod:`offramp.compiler.steps.settling`).
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
"""Defaults for the smallest share of equal tokens, or of equal pixels, at which two answers agree;
key points must all be equal. Pixels at the borders of objects are ambiguous for every model: two
answers that differ in 5 % of an image's pixels are about equally right."""
WITHIN_SPREAD: Final = 0.1
"""Default for the largest difference of regression values, as a share of their standard
deviation."""
WITHIN_MAP: Final = 0.05
"""Default for the largest distance of key points, as a share of the map's longer side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The user's options about the task of the answers; ``None`` means the task's default."""

    kind: AskedKind = "auto"
    share: float | None = None
    within: float | None = None
    class_map: bool = False
    """True to answer with the classes of pixels or tokens in place of their scores."""

    def settle(self, kind: TaskKind) -> AnswerTask:
        """Return the task of a kind; ModelError if an option does not apply to it."""
        share, within = self.share, self.within
        if share is not None and kind not in DENSE:
            raise ModelError(
                f"--agree-share {share:g} does not apply to {kind}, whose answers have no tokens, "
                "pixels or key points; leave it out"
            )
        if within is not None and kind not in ("pose", "regression"):
            raise ModelError(
                f"--agree-within {within:g} does not apply to {kind}, where classes are equal or "
                "not; leave it out"
            )
        return AnswerTask(
            kind=kind,
            share=SHARES.get(kind, 1.0) if share is None else share,
            within=(WITHIN_MAP if kind == "pose" else 0.0) if within is None else within,
        )


class VariantSource(Protocol):
    """Protocol of an object that makes variants of the model being compiled."""

    @property
    def flag(self) -> str:
        """Option that asks for variants."""
        ...

    @property
    def combinations(self) -> Sequence[Illegal]:
        """Combinations with other options that are refused."""
        ...

    def prepare(self, model: Any) -> Any:
        """Return a :class:`.VariantFinder` for a :class:`.SourceModel`; raises CompileError."""
        ...


SEEDS = 2**63
"""Number of possible seeds: torch accepts no larger seed, and numpy no negative one."""
_INF = float("inf")
_A_SHARE = "a share above 0 and below 1"
_FROM_0 = "a share from 0, and below 1"
DEFAULT_CONFIDENCE_LEVEL = 0.95
"""Default confidence level of a promise."""
Selection: TypeAlias = Literal["savings", "pame"]
"""Method of choosing the exits in use among those that were built."""
AskedPrecision: TypeAlias = Literal["fp32", "int8", "auto"]
"""Values of ``eecompile --precision`` for bundles."""
Training: TypeAlias = Literal["frozen", "joint"]
"""Training of exits on the unchanged model, or also of a copy of it together with them."""
HeadFamily: TypeAlias = Literal["auto", "pooled", "bridges", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """Options of reading the model, and properties of its answers."""

    answer: str | None = None
    """Output that exits imitate, if the model has several."""
    task: AskedKind = "auto"
    """Task of the answers; ``auto`` infers it from the graph."""
    agree_share: float | None = None
    """The smallest share of tokens, pixels or key points that must be equal for two answers to
    agree."""
    agree_within: float | None = None
    """The largest difference of values at which two answers agree, or the largest distance of key
    points as a share of the map's longer side."""
    class_map: bool = False
    """True to answer with the class of each pixel or token, in one byte each, instead of the
    scores."""
    answer_tokens: tuple[int, ...] = ()
    """Ids of the tokens that a decoder [batch, tokens, vocabulary] answers with, as classes; the
    model is reduced to their logits after the last token of the prompt."""
    max_cut_tensors: int = 4
    """Largest number of tensors at a cut point, for places where no single tensor carries all
    data."""
    simplify: bool = True
    simplify_limit: float = 180.0
    """Seconds that simplifying may take; after that the model is compiled without it."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= 1, "above 0, and at most 1", "agree_share")
        refuse_unless(self, lambda v: 0 <= v < _INF, "0 or more", "agree_within")
        refuse_unless(self, lambda v: v >= 1, "at least 1", "max_cut_tensors")
        refuse_unless(self, lambda v: 0 < v < _INF, "above 0", "simplify_limit")

    @property
    def task_options(self) -> TaskOptions:
        """The options that describe the task, for reading the model."""
        return TaskOptions(
            kind=self.task,
            share=self.agree_share,
            within=self.agree_within,
            class_map=self.class_map,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOptions:
    """Promise about answers, and the definition of independent samples, which count as evidence."""

    max_disagreement: float = 0.01
    max_class_disagreement: float | None = None
    """Bound on the answers of each class of the model separately; ``None`` for no bound."""
    confidence_level: float = DEFAULT_CONFIDENCE_LEVEL
    group: str | None = None
    """Array of the data whose equal values mark samples that belong together."""
    copies_within: float = COPIES_WITHIN
    """Samples nearer than this share of the typical distance may count as copies of one sample;
    with 0 only equal samples do, and consecutive rows are never taken for a series."""

    def __post_init__(self) -> None:
        shares = ("max_disagreement", "max_class_disagreement", "confidence_level")
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, *shares)
        refuse_unless(self, lambda v: 0 <= v < 1, _FROM_0, "copies_within")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOptions:
    """Places of exits, their heads, and how these are trained."""

    exits: tuple[str, ...] = ()
    """Cut points to build exits at, as texts of :class:`offramp.compiler.ExitRule`. If empty, at
    most ``candidates`` cut points are chosen."""
    candidates: int = 12
    """Largest number of exits to build."""
    heads: HeadFamily = "auto"
    """Kind of heads: ``pooled`` pool their cut tensor; ``bridges`` are the model's own blocks and
    head (PAME 5.1); ``both`` takes, at each place, the kind with the larger net savings; ``auto``
    means bridges if answers have positions, else pooled heads."""
    criterion: str = "probability"
    """Measure of an exit's confidence, for classification: the name of a :class:`.Criterion`, or of
    a registered criterion (:mod:`offramp.engine.answers.criteria`)."""
    mask: str | None = None
    """Graph input that marks the tokens that count; found by its name by default."""
    augment: Literal["auto", "off"] = "auto"
    """With ``auto``, heads are also trained on generated samples, if a generator
    (:mod:`offramp.calibration.data.augmentation`) suits the inputs."""
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: v >= 1, "at least 1", "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Copy of the model that exits may follow: its precision, and its training."""

    precision: AskedPrecision = "fp32"
    """With ``int8``, exits follow a quantised copy of the model, whose own answer is the last exit;
    samples below every threshold run through the unmodified model. If that saves nothing on this
    machine, fp32 is used, with a warning; ``auto`` is the same without the warning."""
    train: Training = "frozen"
    """With ``joint``, a copy of the model is trained together with its exits (PAME 5.2), and used
    if it saves more time. The copy's own answer is the last exit, and the unmodified model answers
    the remaining samples."""
    teach: Teacher = "model"
    """Teacher of the trained copy: the unmodified model's answers, or the data's labels."""
    joint_rate: float = 1e-4
    """Peak learning rate of training the copy."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "joint_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Method of choosing the exits in use among those that were built."""

    selection: Selection = "savings"
    """With ``savings``, the set of exits that is expected to save the most time is used. With
    ``pame``, exits are searched by rehearsing batches of the tuning split, so that few batches
    become slower than the unmodified model."""
    max_overhead: float | None = None
    """Largest time that exits (and a copy in front of the model) may add for a sample that leaves
    at no exit, as a share of the source model's time at the reference batch size (Apparate's ramp
    budget). A measured time counts only if it is statistically significant. ``None`` is no limit:
    the added time only reduces the savings. With ``savings`` only."""
    rehearsal_batch: int = 32
    """Number of rows in a rehearsed batch. With ``pame`` only."""
    max_violations: float = 0.02
    """Largest share of batches that an exit may make slower than the unmodified model. With
    ``pame`` only."""
    min_gain: float = 0.01
    """The smallest share of the source model's time by which each exit must reduce the mean
    latency; 0 is no limit, as in PAME. With ``pame`` only."""
    reference_batch_size: int = 8
    """Batch size for which savings are predicted from the profiled times."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "max_overhead")
        refuse_unless(self, lambda v: 0 <= v < 1, _FROM_0, "max_violations", "min_gain")
        sizes = ("rehearsal_batch", "reference_batch_size")
        refuse_unless(self, lambda v: v >= 1, "at least 1", *sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of one run of ``eecompile``."""

    model: Path
    data: Path | DataSource
    """Calibration data: a source, or the path of an npz file or of a folder of npy files."""
    output: Path
    overwrite: bool = False
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    promise: PromiseOptions = field(default_factory=PromiseOptions)
    building: ExitOptions = field(default_factory=ExitOptions)
    copy: CopyOptions = field(default_factory=CopyOptions)
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    tolerance: float | None = None
    """Largest relative difference between the chained segments and the source model. ``None`` means
    the default for the precision of the model (:mod:`offramp.compiler.common.rounding`)."""
    threads: int = 1
    """Threads of ONNX Runtime while profiling."""
    seed: int = 0
    variants: VariantSource | None = None
    """Source of smaller variants of the model, each with separate exits."""
    scratch: Path | None = None
    """Folder that features are recorded in; ``None`` is the system's folder for temporary files."""
    scratch_limit: float = 4.0
    """Largest size of recorded features in GiB at a time; the rest is recorded in later passes over
    the data."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, _A_SHARE, "tolerance")
        refuse_unless(self, lambda v: v >= 1, "at least 1", "threads")
        refuse_unless(self, lambda v: 0 < v < _INF, "above 0", "scratch_limit")
        refuse_unless(self, lambda v: 0 <= v < SEEDS, f"from 0 to {SEEDS - 1}", "seed")

    @classmethod
    def of(cls, **named: Any) -> CompileOptions:
        """Create options from one flat list of names, as flags and keyword arguments have them.

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
        """True if the data is random inputs, which certify nothing."""
        return isinstance(self.data, RandomSource)


_GROUPS: Final[dict[str, Any]] = {
    "reading": ReadingOptions,
    "promise": PromiseOptions,
    "building": ExitOptions,
    "copy": CopyOptions,
    "choice": ChoiceOptions,
}
"""Groups of options, by the name of the field of :class:`CompileOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions:
    """Options of a subcommand that reads a bundle, and writes the bundle again with changes."""

    bundle: Path
    output: Path | None = None
    """Bundle to write; ``None`` replaces the bundle that is read."""
    overwrite: bool = False
    """True if ``output`` may replace another bundle."""
    dry_run: bool = False
    """True to write nothing."""

    def target(self) -> Path | None:
        """Return the path to write to, after checking it; ``None`` in a dry run."""
        if self.dry_run:
            return None
        if self.output is None:
            target = self.bundle.resolve()  # a link to the bundle stays a link
            check_writable(target)
            return target
        check_target(self.output, overwrite=self.overwrite)
        return self.output

    @property
    def replaces(self) -> bool:
        """True if a bundle at the target is replaced."""
        return self.output is None or self.overwrite


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(RewriteOptions):
    """Options of one run of ``eecompile profile``."""

    threads: int | None = None
    """Threads of ONNX Runtime; ``None`` means as many as the bundle was profiled with."""
    backend: str = "onnxruntime"
    """Backend to measure: the CPU, or ``tensorrt`` or ``cuda`` on a GPU."""
    device: str = "cuda:0"
    """GPU to measure on, as ``cuda:N``; unused for ``onnxruntime``."""
    json: Path | None = None
    """File to write the profile to. With it, the bundle is not changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions(RewriteOptions):
    """Options of one run of ``eecompile rehearse``.

    Where an option is ``None``, the value that the bundle was made with is used.
    """

    data: Path | DataSource
    group: str | None = None
    copies_within: float | None = None
    from_scratch: bool = False
    """True to search the exits from scratch instead of adapting the policy."""
    max_disagreement: float | None = None
    max_class_disagreement: float | None = None
    confidence_level: float | None = None
    rehearsal_batch: int | None = None
    max_violations: float | None = None
    min_gain: float | None = None
    """The smallest gain of each exit, as in :class:`ChoiceOptions`; for a search only."""
    seed: int = 0


def depends_on_earlier(values: Mapping[str, object]) -> bool:
    """Return whether the criterion of an exit depends on the answers of earlier exits."""
    try:
        return known_criterion(str(values["--criterion"])).depends_on_earlier
    except CriterionError:  # refused elsewhere
        return False


def _is_not_probability(values: Mapping[str, object]) -> bool:
    return values["--criterion"] != "probability"


def _is_learned_or_depends(values: Mapping[str, object]) -> bool:
    return values["--criterion"] == "learned" or depends_on_earlier(values)


def _is_on_host(values: Mapping[str, object]) -> bool:
    return values["--criterion"] not in IN_GRAPH


_READING: Final = tuple(
    Illegal(option=flag, without="--data",
            why="it is an option for reading data; leave it out, or add --data")
    for flag in ("--preprocessing", *(option.flag for option in OPTIONS))
)  # fmt: skip
_ONE_MODEL = "it is for exits of the unchanged float32 model; take probability, entropy or margin"
_UNCERTIFIED = "nothing is certified on random inputs; leave it out, or use samples"
NO_ENGINES: Final = (
    Illegal(option="--criterion", other="--backend tensorrt", when=_is_on_host,
            why="the host computes this criterion, which is for CPUs; choose probability, "
            "entropy, margin or learned, or --backend onnxruntime"),
    Illegal(option="--train joint", other="--backend tensorrt",
            why="a bundle with a copy of the model is for ONNX Runtime; leave one of them out"),
    Illegal(option="--precision int8|auto", other="--backend tensorrt",
            why="the int8 copy is for CPUs, and engines are made of a float32 bundle; compile "
            "without --precision, then eecompile build --precision int8 or auto"),
    Illegal(option="--custom-ops", other="--backend tensorrt",
            why="TensorRT's engines cannot hold operators of a library; choose --backend "
            "onnxruntime, for serving too"),
)  # fmt: skip
"""Combinations of options whose bundle cannot have engines. For these, ``--backend auto`` builds
none."""
COMPILE: Final[tuple[Illegal, ...]] = (
    *NO_ENGINES,
    *_READING,
    Illegal(option="--criterion", other="--heads bridges|both", when=_is_not_probability,
            why="criteria are for pooled heads; leave one of them out"),
    Illegal(option="--criterion", other="--precision int8|auto", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", other="--train joint", when=_is_learned_or_depends,
            why=_ONE_MODEL),
    Illegal(option="--criterion", other="--selection pame", when=depends_on_earlier,
            why="all exits have to run for this criterion, and pame takes single ones; leave one "
            "of them out"),
    Illegal(option="--heads bridges|both", other="--precision int8|auto",
            why="bridges are for float32; leave one of them out"),
    Illegal(option="--train joint", other="--precision int8|auto",
            why="a bundle has one copy of the model; leave one of them out"),
    Illegal(option="--train joint", other="--class-map",
            why="joint training learns scores, and classes alone have none; leave one of them out"),
    Illegal(option="--teach labels", without="--train joint",
            why="only the copy of the model learns from labels; add it, or leave this out"),
    Illegal(option="--joint-rate", without="--train joint",
            why="it is the learning rate of the copy; add --train joint, or leave this out"),
    Illegal(option="--max-overhead", other="--selection pame",
            why="pame bounds late batches instead; use --max-violations, or leave --selection "
            "out"),
    Illegal(option="--rehearsal-batch", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--max-violations", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--min-gain", without="--selection pame",
            why="nothing is rehearsed then; add it, or leave this out"),
    Illegal(option="--candidates", other="--exits",
            why="--exits names all places; leave one of them out"),
    Illegal(option="--simplify-limit", other="--no-simplify",
            why="onnxslim does not run; leave one of them out"),
    *(Illegal(option=option, other="--data random", why=_UNCERTIFIED)
      for option in ("--max-disagreement", "--confidence", "--max-class-disagreement", "--group",
                     "--copies-within", "--teach labels")),
)  # fmt: skip
_AS_THERE = "the existing engines determine it; leave one of them out"
_KEPT = "auto keeps what is certified; leave one of them out"
PROFILE: Final = (
    Illegal(option="--backend tensorrt|cuda", without="--json",
            why="a bundle's own profile is of a CPU; name a file, to be used in a cluster file"),
    Illegal(option="--device", without="--backend tensorrt|cuda",
            why="the CPU is measured; leave it out, or choose one of these"),
    Illegal(option="--threads", other="--backend tensorrt|cuda",
            why="a GPU is measured; leave it out"),
    *(Illegal(option="--json", other=other, why="the bundle stays as it is; leave one of them out")
      for other in ("--output", "--overwrite", "--dry-run")),
)  # fmt: skip
BUILD: Final = (
    *_READING,
    Illegal(option="--units", other="--parts",
            why="both choose what is built; leave one of them out"),
    *(Illegal(option="--while-serving", other=other, why=_AS_THERE)
      for other in ("--batch-profiles", "--buckets", "--workspace", "--optimization-level")),
    Illegal(option="--precision auto", other="--dry-run",
            why="what is built is known once engines have been timed; leave one of them out"),
    Illegal(option="--precision auto", other="--while-serving",
            why="a server keeps the precision that it began with; name that precision"),
    Illegal(option="--precision auto", other="--accept-disagreement", why=_KEPT),
    Illegal(option="--precision auto", other="--units",
            why="engines of all stages are timed; leave one of them out"),
    Illegal(option="--precision auto", other="--parts",
            when=lambda values: not {"source", "stages"} <= {*str(values["--parts"]).split(",")},
            why="engines of source and stages are timed; name both, or leave --parts out"),
    Illegal(option="--precision int8", without="--data",
            why="the ranges of activations are measured on calibration data; use the data that the "
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
    """Raise OptionsConflictError if options given from Python exclude each other.

    An option counts as given if it differs from its default.
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
