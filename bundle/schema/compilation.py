"""What a bundle says of its compilation: data, joint training, CPU, libraries, what was found.

Parts of the manifest: distinct samples of the calibration data, joint training of a copy with its
exits, what batches change of answers, the cost of shared weights, and what answers depend on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from offramp.bundle.schema.serde import check_hash, check_numbers
from offramp.certify.binomial import half_risk, upper_bound

COPIES_WITHIN: Final = 0.1
"""Share of the typical distance between rows within which rows may be copies, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctSamples:
    """Rows of the calibration data that count as one sample each, and why others do not."""

    rows: int
    """Rows of the data."""
    samples: int
    """Distinct samples: groups of rows that belong together."""
    found: tuple[str, ...]
    """Reasons why rows do not count by themselves, each with the number of rows."""
    key: str | None = None
    """Array of the data that groups rows (``--group``)."""
    within: float = COPIES_WITHIN
    """``--copies-within`` of the compilation: the same data are grouped in the same way by it."""

    def __post_init__(self) -> None:
        check_numbers(self, "rows", least=1)
        check_numbers(self, "samples", least=1, most=self.rows)
        check_numbers(self, "within", least=0, most=1)

    def describe(self) -> str:
        """Return a sentence without its end."""
        why = "; ".join(self.found) or "none belong together"
        return f"of {self.rows:,} rows of calibration data {why}"


Teacher: TypeAlias = Literal["model", "labels"]
"""What answers are learned: the unmodified model's own, or the data's labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEpoch:
    """How the tuning split was answered after an epoch."""

    losses: tuple[float, ...]
    """Of every exit in depth order, and last of the trained model's own answer."""
    agreement: tuple[float, ...]
    """Likewise: the share of samples answered like the unmodified model."""

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.agreement) or not self.losses:
            raise ValueError(
                f"losses: {len(self.losses)} of {len(self.agreement)} answers, expected one each"
            )
        if any(not 0 <= share <= 1 for share in self.agreement):
            raise ValueError(f"agreement: {list(self.agreement)!s:.100} is not within 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTraining:
    """How a copy of the model was trained together with its exits (PAME 5.2)."""

    teacher: Teacher
    learning_rate: float
    """At its peak."""
    epochs: tuple[JointEpoch, ...]
    """First as it was before training."""
    kept: int
    """The epoch whose weights the bundle has; 0 is none."""

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", least=0)
        check_numbers(self, "kept", least=0)
        if self.kept >= len(self.epochs):
            raise ValueError(f"kept: {self.kept}, expected one of {len(self.epochs)} epochs")

    def describe(self) -> str:
        """``by labels, 6 epochs, weights of epoch 4 are kept``, for reports."""
        taught = "the unmodified model's answers" if self.teacher == "model" else "labels"
        return f"by {taught}, {len(self.epochs) - 1} epochs, weights of epoch {self.kept} are kept"


_STEPS = 10_000
"""Shares are rounded up to hundredths of a percent, so that they can be told as they are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEffect:
    """How often a dynamically quantised model answers a sample otherwise in another batch.

    Its operators round a row by the range of all rows of the batch. It was counted on samples that
    nothing was certified on, before exits were chosen: what is left of the promise for exits
    depends on no sample of the certify split.
    """

    operators: tuple[str, ...]
    """Names of those that round by the batch."""
    batch_sizes: tuple[int, ...]
    """That answers were compared at."""
    samples: int
    end_differs: int
    """Samples whose answer is not the same at all of these batch sizes."""
    max_disagreement: float
    """That was asked for, of this and of exits together."""
    confidence_level: float
    """Of both together."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "samples", least=1)
        check_numbers(self, "end_differs", least=0, most=self.samples)

    def spent(self, confidence_level: float) -> float:
        """Share of samples that may be answered otherwise in another batch, at half the risk."""
        bound = upper_bound(self.end_differs, self.samples, half_risk(confidence_level))
        return math.ceil(bound * _STEPS) / _STEPS

    def left(self) -> float:
        """Share of samples that exits may answer otherwise; nothing is left at 0 and below."""
        return self.max_disagreement - self.spent(self.confidence_level)

    def describe(self) -> str:
        """One sentence for reports and the command line."""
        *sizes, last = map(str, self.batch_sizes)
        spent = self.spent(self.confidence_level)
        return (
            f"In batches of {', '.join(sizes)} and {last} the model itself answers "
            f"{self.end_differs:,} of {self.samples:,} samples otherwise "
            f"({self.end_differs / self.samples:.2%}), as {len(self.operators)} operators round by "
            f"the range of the whole batch: at most {spent:.2%} of samples in batches as these at "
            f"{half_risk(self.confidence_level):.2%} confidence, which is taken from the promise "
            f"({self.max_disagreement:.2%} at {self.confidence_level:.0%})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost:
    """Time and memory of one of a bundle's models, with weights shared and with packed ones.

    A runtime that packs weights for its kernels holds a private copy of them in each session.
    Sessions that share the bundle's file of weights hold none, and take longer.
    """

    variant: int
    """0 is the full model."""
    time_ratio: float
    """Measured: time with shared weights over that with packed ones, as one graph, at
    ``Calibration.reference_batch_size``; the median of rounds in turns."""
    half_width: float
    """Half of the interval that holds the ratio with 95 % confidence."""
    packed_bytes: int
    """Counted: bytes of the weights that packing makes private copies of."""

    def __post_init__(self) -> None:
        check_numbers(self, "variant", "half_width", "packed_bytes", least=0)
        check_numbers(self, "time_ratio", above=0, most=1e6)

    @property
    def more_time(self) -> float:
        """How much longer a run takes with shared weights, as a share; may be below 0."""
        return self.time_ratio - 1

    def describe(self) -> str:
        """``21 % longer (measured), 120.0 MiB less of its own (counted)``, for people."""
        share, size = round(100 * self.more_time), self.packed_bytes / 2**20
        longer = f"{share} % longer" if share > 0 else "no longer"
        return f"{longer} (measured), {size:.1f} MiB less of its own (counted)"


CPU_FLAGS: Final = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx_vnni": "AVX_VNNI",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni_int8": "AVX_VNNI_INT8",
    "amx_int8": "AMX_INT8",
    "avx512_bf16": "AVX512_BF16",
    "amx_bf16": "AMX_BF16",
    "avx512_fp16": "AVX512_FP16",
    "amx_fp16": "AMX_FP16",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "asimdhp": "FP16",
}
"""Linux's words for the instructions of interest, and the vendors'."""
_SUMS_IN_INT32: Final = {"AVX_VNNI", "AVX512_VNNI", "AVX_VNNI_INT8", "AMX_INT8"}
_MOST_NAMES: Final = 64
_MOST_LETTERS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFeatures:
    """Instructions of a CPU that its precision depends on: facts; kinds of int8 are measured.

    :func:`offramp.engine.common.environment.cpu_features` reads those of this machine.
    """

    machine: str
    """Of Python's ``platform.machine()``."""
    names: tuple[str, ...] | None
    """Those of interest that it has; ``None`` where that is not known."""

    def __post_init__(self) -> None:
        names = (self.machine, *(self.names or ()))
        if len(names) > _MOST_NAMES or any(len(name) > _MOST_LETTERS for name in names):
            raise ValueError(
                f"names {names!s:.100} are more than {_MOST_NAMES}, or longer than "
                f"{_MOST_LETTERS} letters"
            )

    @property
    def saturates(self) -> bool | None:
        """Whether products of uint8 and int8 may be clipped to int16; ``None`` if not known.

        Without VNNI, x86 adds pairs of them in int16: weights of 8 bits overflow there, and int8
        agrees less than it does elsewhere.
        """
        if self.names is None:
            return None
        return self.machine in {"x86_64", "AMD64"} and _SUMS_IN_INT32.isdisjoint(self.names)

    def describe(self) -> str:
        """Say it in a line."""
        if self.names is None:
            return f"{self.machine}, instructions unknown (no /proc/cpuinfo)"
        return f"{self.machine} with {', '.join(self.names) or 'none of interest'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLibrary:
    """A shared library with operators that ONNX Runtime does not have itself.

    It is a name and a hash, never a path: a library is code, and nobody loads one that a bundle
    names, but only what whoever starts a program gives (``--custom-ops``).
    """

    file: str
    """Its file's name, without folders."""
    sha256: str
    """Of its content, 64 hexadecimal digits."""
    operators: tuple[str, ...]
    """Those that the graphs use, as ``domain:Name``."""

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or "\\" in self.file:
            raise ValueError(f"file {self.file!r:.100} is not a file's name without folders")
        check_hash(self.sha256)
        if not self.operators:
            raise ValueError("operators: a library is only named for operators that it has")

    def describe(self) -> str:
        """``ops.so (sha256 0123456789ab…; my.domain:Norm)``, for messages."""
        return f"{self.file} (sha256 {self.sha256[:12]}…; {', '.join(self.operators)})"
