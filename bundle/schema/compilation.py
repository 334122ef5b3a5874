"""Facts of a bundle's compilation: data, joint training, CPU, libraries, measured costs.

Parts of the manifest: distinct samples of the calibration data, joint training of a copy with its
exits, effects of batches on answers, the cost of shared weights, and dependencies of the answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from offramp.bundle.schema.serde import check_hash, check_numbers
from offramp.certify.binomial import half_risk, upper_bound

COPIES_WITHIN: Final = 0.1
"""Default of ``--copies-within``: rows nearer than this share of the typical distance between rows
may be copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctSamples:
    """Number of distinct samples in the calibration data, and why other rows do not count."""

    rows: int
    """Number of rows of the calibration data."""
    samples: int
    """Number of distinct samples: groups of rows that belong together."""
    found: tuple[str, ...]
    """Reasons why rows do not count separately, each with the number of rows."""
    key: str | None = None
    """Name of the array of the data that groups rows (``--group``)."""
    within: float = COPIES_WITHIN
    """Value of ``--copies-within`` in the compilation, needed to group the same data in the same
    way."""

    def __post_init__(self) -> None:
        check_numbers(self, "rows", least=1)
        check_numbers(self, "samples", least=1, most=self.rows)
        check_numbers(self, "within", least=0, most=1)

    def describe(self) -> str:
        """Return a sentence without its full stop."""
        why = "; ".join(self.found) or "none belong together"
        return f"of {self.rows:,} rows of calibration data {why}"


Teacher: TypeAlias = Literal["model", "labels"]
"""Source of the answers that are learned: the unmodified model, or the data's labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEpoch:
    """Results on the tuning split after an epoch."""

    losses: tuple[float, ...]
    """Loss of every exit in depth order, then the loss of the trained model's answer."""
    agreement: tuple[float, ...]
    """Share of samples answered like the unmodified model, in the same order."""

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.agreement) or not self.losses:
            raise ValueError(
                f"losses: {len(self.losses)} for {len(self.agreement)} answers, expected one for "
                "each"
            )
        if any(not 0 <= share <= 1 for share in self.agreement):
            raise ValueError(f"agreement: {list(self.agreement)!s:.100} is not within 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTraining:
    """Joint training of a copy of the model with its exits (PAME 5.2)."""

    teacher: Teacher
    learning_rate: float
    """Largest learning rate during training."""
    epochs: tuple[JointEpoch, ...]
    """Epochs; the first entry is from before training."""
    kept: int
    """Index of the epoch whose weights the bundle has; 0 is before training."""

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", least=0)
        check_numbers(self, "kept", least=0)
        if self.kept >= len(self.epochs):
            raise ValueError(f"kept is {self.kept}, expected one of {len(self.epochs)} epochs")

    def describe(self) -> str:
        """Return ``by labels, 6 epochs, weights of epoch 4 are kept``, for reports."""
        taught = "the unmodified model's answers" if self.teacher == "model" else "labels"
        return f"by {taught}, {len(self.epochs) - 1} epochs, weights of epoch {self.kept} are kept"


_STEPS = 10_000
"""Steps to which shares are rounded up (0.01 %), so that the printed value is the one in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEffect:
    """Share of samples that a dynamically quantised model answers differently in other batches.

    Its operators round a row by the range of all rows of the batch. The share was counted before
    exits were chosen, on samples outside of the certify split. So the rest of the promise, which is
    for exits, does not depend on the certify split.
    """

    operators: tuple[str, ...]
    """Names of the operators that round by the batch."""
    batch_sizes: tuple[int, ...]
    """Batch sizes at which answers were compared."""
    samples: int
    end_differs: int
    """Number of samples whose answer is not the same at all of these batch sizes."""
    max_disagreement: float
    """Bound on differing answers that was requested, for this effect and exits together."""
    confidence_level: float
    """Confidence level for this effect and exits together."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "samples", least=1)
        check_numbers(self, "end_differs", least=0, most=self.samples)

    def spent(self, confidence_level: float) -> float:
        """Return a bound on the share of samples that other batches change, at half of the risk."""
        bound = upper_bound(self.end_differs, self.samples, half_risk(confidence_level))
        return math.ceil(bound * _STEPS) / _STEPS

    def left(self) -> float:
        """Return the share of samples that exits may answer differently; it may be 0 or less."""
        return self.max_disagreement - self.spent(self.confidence_level)

    def describe(self) -> str:
        """Return a sentence for reports and the command line."""
        *sizes, last = map(str, self.batch_sizes)
        spent = self.spent(self.confidence_level)
        return (
            f"In batches of {', '.join(sizes)} and {last} the model itself answers "
            f"{self.end_differs:,} of {self.samples:,} samples differently "
            f"({self.end_differs / self.samples:.2%}), as {len(self.operators)} operators round by "
            f"the range of the whole batch: at most {spent:.2%} of samples in such batches at "
            f"{half_risk(self.confidence_level):.2%} confidence, which is taken from the promise "
            f"({self.max_disagreement:.2%} at {self.confidence_level:.0%})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost:
    """Time and memory of a bundle's model or variant, with shared weights and with packed ones.

    A runtime that packs weights for its kernels holds a private copy of them in each session.
    Sessions that share the bundle's file of weights hold no copy, and take longer.
    """

    variant: int
    """Number of the variant; 0 is the full model."""
    time_ratio: float
    """Measured time with shared weights divided by that with packed ones, as one graph, at
    ``Calibration.reference_batch_size``; median of alternating rounds."""
    half_width: float
    """Half width of the ratio's 95 % interval."""
    packed_bytes: int
    """Counted bytes of the weights that packing copies."""

    def __post_init__(self) -> None:
        check_numbers(self, "variant", "half_width", "packed_bytes", least=0)
        check_numbers(self, "time_ratio", above=0, most=1e6)

    @property
    def more_time(self) -> float:
        """Additional time of a run with shared weights, as a share; may be below 0."""
        return self.time_ratio - 1

    def describe(self) -> str:
        """Return ``21 % longer (measured), 120.0 MiB less of its own (counted)``, for people."""
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
"""Vendors' names of the relevant CPU instructions, by Linux's names."""
_SUMS_IN_INT32: Final = {"AVX_VNNI", "AVX512_VNNI", "AVX_VNNI_INT8", "AMX_INT8"}
_MOST_NAMES: Final = 64
_MOST_LETTERS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFeatures:
    """Instructions of a CPU that affect int8 precision; which kind of int8 is best is measured.

    :func:`offramp.engine.common.environment.cpu_features` reads those of this machine.
    """

    machine: str
    """Result of Python's ``platform.machine()``."""
    names: tuple[str, ...] | None
    """Relevant instructions that the CPU has; ``None`` where they are not known."""

    def __post_init__(self) -> None:
        names = (self.machine, *(self.names or ()))
        if len(names) > _MOST_NAMES or any(len(name) > _MOST_LETTERS for name in names):
            raise ValueError(
                f"names {names!s:.100} are more than {_MOST_NAMES}, or longer than "
                f"{_MOST_LETTERS} letters"
            )

    @property
    def saturates(self) -> bool | None:
        """True if products of uint8 and int8 may be clipped to int16; ``None`` if not known.

        Without VNNI, x86 adds pairs of products in int16: 8-bit weights overflow there, and int8
        agrees less than on other CPUs.
        """
        if self.names is None:
            return None
        return self.machine in {"x86_64", "AMD64"} and _SUMS_IN_INT32.isdisjoint(self.names)

    def describe(self) -> str:
        """Return a line that describes the CPU."""
        if self.names is None:
            return f"{self.machine}, instructions unknown (no /proc/cpuinfo)"
        return f"{self.machine} with {', '.join(self.names) or 'none of interest'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLibrary:
    """A shared library with operators that ONNX Runtime does not have.

    It is a name and a hash, never a path. A library is code: one that a bundle names is never
    loaded, only one that the user who starts a program passes (``--custom-ops``).
    """

    file: str
    """File name of the library, without folders."""
    sha256: str
    """SHA-256 of its content, 64 hexadecimal digits."""
    operators: tuple[str, ...]
    """Operators that the graphs use, as ``domain:Name``."""

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or "\\" in self.file:
            raise ValueError(f"file {self.file!r:.100} is not a file's name without folders")
        check_hash(self.sha256)
        if not self.operators:
            raise ValueError(
                "operators is empty, expected those that the graphs use from the library"
            )

    def describe(self) -> str:
        """Return ``ops.so (sha256 0123456789ab…; my.domain:Norm)``, for messages."""
        return f"{self.file} (sha256 {self.sha256[:12]}…; {', '.join(self.operators)})"
