"""The index of a bundle's engines for a target: the schema of ``engines/FOLDER/index.json``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from offramp.bundle.files import entry_of
from offramp.bundle.schema.manifest import FileEntry, Manifest
from offramp.bundle.schema.policy import ExitPolicy
from offramp.bundle.schema.serde import check_numbers
from offramp.certify.binomial import half_risk, upper_bound

INDEX = "index.json"
"""Name of the index in a target's folder."""
ENGINES_SCHEMA_VERSION = 1
"""Version of the format, raised whenever an older reader would misunderstand a newer index."""

BUILDER_REVISION = 3
"""Version of the builder, raised if it builds other engines; part of each engine's key."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Precision: TypeAlias = Literal["fp32", "tf32", "fp16", "int8"]
"""The precision of the arithmetic inside an engine; inputs and outputs keep the model's types."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ROUNDED: tuple[Precision, ...] = ("fp16", "int8")
"""Precisions that round answers, so that a promise is certified again for them; tf32 has the graphs
of fp32, and no CPU computes in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    """The GPU, TensorRT and precision that engines are built for; they run nowhere else."""

    gpu: str
    """Name of the GPU as its driver reports it, for instance ``NVIDIA H200``."""
    compute_capability: tuple[int, int]
    """Major and minor number, for instance (9, 0)."""
    tensorrt: str
    """Version of TensorRT, for instance ``10.16.0.72``."""
    precision: Precision

    def __post_init__(self) -> None:
        if len(self.compute_capability) != 2 or min(self.compute_capability) < 0:
            raise ValueError(f"compute capability {self.compute_capability} is not (major, minor)")
        if not _slug(self.gpu) or not _slug(self.tensorrt):
            raise ValueError(
                f"a target needs the name of a GPU and a version of TensorRT, got {self.gpu!r} and "
                f"{self.tensorrt!r}"
            )

    @property
    def folder(self) -> str:
        """Name of the folder, in ``[a-z0-9.-]``: ``nvidia-h200-sm90-trt10.16.0.72-fp16``."""
        major, minor = self.compute_capability
        return f"{_slug(self.gpu)}-sm{major}{minor}-trt{_slug(self.tensorrt)}-{self.precision}"

    def runs_where(self, other: EngineTarget) -> bool:
        """Return whether both targets have the same GPU and TensorRT; the precision may differ."""
        return replace(self, precision=other.precision) == other

    def describe(self) -> str:
        """Return ``NVIDIA H200 with TensorRT 10.16.0.72, fp16``, for messages."""
        return f"{self.gpu} with TensorRT {self.tensorrt}, {self.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """The shapes of one input in one profile; TensorRT calls them min, opt and max."""

    least: tuple[int, ...]
    best: tuple[int, ...]
    """The shape that the engine is tuned for."""
    most: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = list(zip(self.least, self.best, self.most, strict=True))
        if not rows or any(not 1 <= least <= best <= most for least, best, most in rows):
            raise ValueError(
                f"shapes {list(self.least)}, {list(self.best)}, {list(self.most)} do not rise "
                "from at least 1 in every dimension"
            )

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Return whether an input of this shape is allowed."""
        if len(shape) != len(self.least):
            return False
        rows = zip(self.least, shape, self.most, strict=True)
        return all(least <= size <= most for least, size, most in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """A range of shapes that an engine is built for (an optimisation profile)."""

    first_batch: int
    """Smallest batch size that the engine takes in this profile."""
    last_batch: int
    """Largest batch size, which the engine is tuned for."""
    inputs: dict[str, ShapeRange]
    """Range of shapes of each input, by name; dimension 0 is the batch."""

    def __post_init__(self) -> None:
        for name, shapes in self.inputs.items():
            batch = shapes.least[0], shapes.most[0]
            if batch != (self.first_batch, self.last_batch):
                raise ValueError(
                    f"input {name!r} has batches {batch[0]} to {batch[1]}, but its profile has "
                    f"{self.first_batch} to {self.last_batch}"
                )

    def takes(self, rows: int) -> bool:
        """Return whether the profile allows batches of ``rows`` rows; ignores their other sizes."""
        return self.first_batch <= rows <= self.last_batch

    def holds(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether the profile allows inputs of these shapes."""
        return all(range_.holds(shapes[name]) for name, range_ in self.inputs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """Facts about an engine in the store (:class:`.EngineStore`)."""

    unit: str
    """Name of the segments and the exit that the engine computes, for instance ``00-03-exit1``."""
    file: str
    """Path of the engine, relative to the target's folder."""
    size_bytes: int
    sha256: str
    key: dict[str, str]
    """Facts that the engine depends on; the engine is up to date as long as none of them changes.
    ``parts`` is the result of :func:`parts_digest`."""
    profiles: tuple[ShapeProfile, ...]
    """Shape profiles, in the order of TensorRT's indices."""
    build_s: float
    """Measured build time, in seconds."""

    @classmethod
    def of(
        cls,
        unit: str,
        plan: bytes,
        *,
        key: dict[str, str],
        profiles: tuple[ShapeProfile, ...],
        build_s: float,
    ) -> EngineEntry:
        """Return the entry of a TensorRT plan that was just built."""
        file = addressed(unit, plan, ".plan")
        return cls(
            unit=unit,
            file=file.path,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
            key=key,
            profiles=profiles,
            build_s=build_s,
        )

    @property
    def content(self) -> FileEntry:
        """Entry of the file that contains the engine."""
        return FileEntry(path=self.file, size_bytes=self.size_bytes, sha256=self.sha256)

    def profile_for(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Return the index of the first profile that allows inputs of these shapes, or ``None``."""
        return next((i for i, p in enumerate(self.profiles) if p.holds(shapes)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionEvidence:
    """Answers of the engines of one precision, and the policy that was certified on them.

    The promise has two parts (E3 2.1), each with half of the risk. First, the model's end in this
    precision answers at most a share :meth:`spent` of the samples unlike the float32 model. Second,
    the exits answer samples unlike that end for at most the rest of the promised share; this part
    is certified.
    """

    model: str
    """Hash of the model and its policy: :func:`model_digest`."""
    policy: ExitPolicy
    """Policy whose promise compares exits with the model's end in this precision."""
    records: FileEntry
    """Records in a bundle's form; exits and the model's end were computed in this precision."""
    samples: int
    """Number of samples of the certify split."""
    end_differs: int
    """Number of samples on which the model's end in this precision and the float32 model differ."""
    max_disagreement: float
    """Bound on the share of answers unlike the float32 model's, for the end and the exits
    together."""
    confidence_level: float
    """Confidence level of ``max_disagreement``."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "samples", least=1)
        check_numbers(self, "end_differs", least=0, most=self.samples)

    def spent(self, confidence_level: float) -> float:
        """Return the share of the promise that the model's end takes.

        It is an upper bound, at half of the risk, on the share of samples that ``end_differs``
        counts.
        """
        return upper_bound(self.end_differs, self.samples, half_risk(confidence_level))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIndex:
    """Content of ``index.json`` in a target's folder: all files that are kept for the target."""

    schema_version: int
    target: EngineTarget
    engines: tuple[EngineEntry, ...]
    """Engines, sorted by their units; each unit occurs once."""
    timing_cache: FileEntry | None
    """TensorRT's cache of timed tactics, which makes the next build faster."""
    kernels: FileEntry | None
    """Offramp's kernels, compiled for the target's GPU."""
    evidence: PrecisionEvidence | None = None
    """Evidence for the precision; ``None`` where the bundle's own policy is served: in fp32, or if
    that policy was accepted unchanged."""

    def __post_init__(self) -> None:
        units = [entry.unit for entry in self.engines]
        if units != sorted(set(units)):
            raise ValueError(f"engines: units {units} must increase")
        # Files that an index no longer names are deleted: an unchecked path could be any user file.
        for name in sorted(self.files):
            if _FILE_NAME.fullmatch(name) is None or name.lower() == INDEX:
                raise ValueError(f"{name!r} is not the name of a file in the folder of {INDEX}")

    @property
    def files(self) -> set[str]:
        """The names of all files that the index lists, relative to the target's folder."""
        records = self.evidence and self.evidence.records
        others = [file.path for file in (self.timing_cache, self.kernels, records) if file]
        return {*(entry.file for entry in self.engines), *others}


def unit_name(first_segment: int, last_segment: int, exit_: int | None, variant: int = 0) -> str:
    """Return the name of an engine's parts: ``00-12``, or ``00-03-exit1`` if an exit is included.

    Names for the bundle's variants begin with their number: ``variant1-00-03-exit1``.
    """
    span = f"variant{variant}-" if variant else ""
    span += f"{first_segment:02d}-{last_segment:02d}"
    return span if exit_ is None else f"{span}-exit{exit_}"


def checkable_key(target: EngineTarget, parts: str) -> dict[str, str]:
    """Return the entries of an engine's key that a server can check without building the graph.

    ``parts`` is the hash of the files that the engine is made of (:func:`parts_digest`).
    """
    return {
        "tensorrt": target.tensorrt,
        "gpu": target.gpu,
        "compute_capability": "{}.{}".format(*target.compute_capability),
        "precision": target.precision,
        "parts": parts,
        "builder": str(BUILDER_REVISION),
    }


def parts_digest(
    manifest: Manifest, first_segment: int, last_segment: int, exit_: int | None, variant: int = 0
) -> str:
    """Hash the files of a bundle that an engine is made of, from the manifest alone.

    With this hash in an engine's key, a server can check that the engine belongs to this bundle.
    """
    manifest = manifest.of_variant(variant)
    names = [segment.file for segment in manifest.segments[first_segment : last_segment + 1]]
    if exit_ is not None:
        names.append(manifest.exits[exit_].file)
    elif len(names) == len(manifest.segments):
        names = [manifest.source.file]
    return _digest_of(manifest, names)


def model_digest(manifest: Manifest) -> str:
    """Hash everything that a certified policy depends on: graphs, policy and records."""
    names = ["policy.json", "records.npz", manifest.source.file]
    names += [segment.file for segment in manifest.segments]
    names += [exit_.file for exit_ in manifest.exits]
    return _digest_of(manifest, names)


def kernels_stem(source: str) -> str:
    """Return the start of the kernels' file name; it contains the hash of their source."""
    return f"kernels-{source[:16]}"


def addressed(stem: str, content: bytes, suffix: str) -> FileEntry:
    """Return the entry of a file of the store; the file's name contains the hash of its content."""
    digest = hashlib.sha256(content).hexdigest()
    return entry_of(f"{stem}-{digest[:16]}{suffix}", content)


def _digest_of(manifest: Manifest, names: Iterable[str]) -> str:
    # A graph's own hash does not cover the weights that it names; ``filled_sha256`` does.
    hashes = {entry.path: entry.filled_sha256 or entry.sha256 for entry in manifest.files}
    return hashlib.sha256("\n".join(hashes[name] for name in names).encode()).hexdigest()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+|\.{2,}", "-", text.lower()).strip("-.")
