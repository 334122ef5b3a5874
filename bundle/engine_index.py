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
"""The index's file in a target's folder."""
ENGINES_SCHEMA_VERSION = 1
"""Bumped whenever an older reader would misunderstand a newer index."""

BUILDER_REVISION = 3
"""Bumped whenever our way of building engines changes what comes out; it is in their keys."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Precision: TypeAlias = Literal["fp32", "tf32", "fp16", "int8"]
"""The precision of the arithmetic inside an engine; inputs and outputs keep the model's types."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ROUNDED: tuple[Precision, ...] = ("fp16", "int8")
"""Those that round answers, so that a promise is certified anew for them; tf32 has the graphs of
fp32, and no CPU computes in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    """The GPU, TensorRT and precision that engines are built for; they run nowhere else."""

    gpu: str
    """The driver's name of it, for instance ``NVIDIA H200``."""
    compute_capability: tuple[int, int]
    """Major and minor, for instance (9, 0)."""
    tensorrt: str
    """Version of TensorRT, for instance ``10.16.0.72``."""
    precision: Precision

    def __post_init__(self) -> None:
        if len(self.compute_capability) != 2 or min(self.compute_capability) < 0:
            raise ValueError(f"compute capability {self.compute_capability} is not (major, minor)")
        if not _slug(self.gpu) or not _slug(self.tensorrt):
            raise ValueError(f"GPU {self.gpu!r} or TensorRT {self.tensorrt!r} has no name")

    @property
    def folder(self) -> str:
        """Name of the folder: ``nvidia-h200-sm90-trt10.16.0.72-fp16``; only ``[a-z0-9.-]``."""
        major, minor = self.compute_capability
        return f"{_slug(self.gpu)}-sm{major}{minor}-trt{_slug(self.tensorrt)}-{self.precision}"

    def runs_where(self, other: EngineTarget) -> bool:
        """Whether its engines run where those of the other do: all but the precision is equal."""
        return replace(self, precision=other.precision) == other

    def describe(self) -> str:
        """``NVIDIA H200 with TensorRT 10.16.0.72, fp16``, for messages."""
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
        """Whether an input of this shape may be given."""
        if len(shape) != len(self.least):
            return False
        rows = zip(self.least, shape, self.most, strict=True)
        return all(least <= size <= most for least, size, most in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProfile:
    """One of the ranges of shapes that an engine is built for (an optimisation profile)."""

    first_batch: int
    """Smallest batch."""
    last_batch: int
    """Largest batch, which the engine is tuned for."""
    inputs: dict[str, ShapeRange]
    """By name of the input; dimension 0 is the batch."""

    def __post_init__(self) -> None:
        for name, shapes in self.inputs.items():
            batch = shapes.least[0], shapes.most[0]
            if batch != (self.first_batch, self.last_batch):
                raise ValueError(
                    f"input {name!r} has batches {batch[0]} to {batch[1]}, its profile "
                    f"{self.first_batch} to {self.last_batch}"
                )

    def takes(self, rows: int) -> bool:
        """Whether a batch of so many rows can be run with this profile, by its size."""
        return self.first_batch <= rows <= self.last_batch

    def holds(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether inputs of these shapes can be run with this profile."""
        return all(range_.holds(shapes[name]) for name, range_ in self.inputs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """An engine of the store."""

    unit: str
    """Name of what it computes, for instance ``00-03-exit1``."""
    file: str
    """Relative to the target's folder."""
    size_bytes: int
    sha256: str
    key: dict[str, str]
    """What the engine depends on; it is fresh as long as all of it is equal. ``parts`` is that of
    :func:`parts_digest`."""
    profiles: tuple[ShapeProfile, ...]
    """In the order of TensorRT's indices."""
    build_s: float
    """Seconds that building it took, measured."""

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
        """Describe a plan that was just built."""
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
        """The file that holds it."""
        return FileEntry(path=self.file, size_bytes=self.size_bytes, sha256=self.sha256)

    def profile_for(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Index of the first profile that holds inputs of these shapes."""
        return next((i for i, p in enumerate(self.profiles) if p.holds(shapes)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionEvidence:
    """What engines of a precision answer, and the policy that was certified of that.

    The promise is shared (E3 2.1): the model's end in the precision answers some samples unlike the
    float32 model, at most :meth:`spent` of them at half of the risk; what exits answer unlike that
    end is certified to stay within the rest, at the other half.
    """

    model: str
    """Of what it is: :func:`model_digest`."""
    policy: ExitPolicy
    """Its promise is about the model's end in this precision."""
    records: FileEntry
    """As a bundle's own, of exits in this precision; final is the end in it."""
    samples: int
    """Of the certify split."""
    end_differs: int
    """Those that the model's end in this precision answers unlike the float32 model."""
    max_disagreement: float
    """With the float32 model, of both together."""
    confidence_level: float
    """Of both together."""

    def __post_init__(self) -> None:
        check_numbers(self, "max_disagreement", "confidence_level", above=0, below=1)
        check_numbers(self, "samples", least=1)
        check_numbers(self, "end_differs", least=0, most=self.samples)

    def spent(self, confidence_level: float) -> float:
        """Share of samples that the end may answer unlike the float32 model, at half the risk."""
        return upper_bound(self.end_differs, self.samples, half_risk(confidence_level))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIndex:
    """``index.json`` of a target's folder."""

    schema_version: int
    target: EngineTarget
    engines: tuple[EngineEntry, ...]
    """Rising by name of the unit, each once."""
    timing_cache: FileEntry | None
    """What TensorRT remembers of the tactics that it timed; makes the next build faster."""
    kernels: FileEntry | None
    """Our own kernels, compiled for the target's GPU."""
    evidence: PrecisionEvidence | None = None
    """``None`` where the bundle's own policy is served: in fp32, or as it was accepted."""

    def __post_init__(self) -> None:
        units = [entry.unit for entry in self.engines]
        if units != sorted(set(units)):
            raise ValueError(f"engines: units {units} must rise")
        # What an index no longer names is deleted: a name with a path could be any of the user's.
        for name in sorted(self.files):
            if _FILE_NAME.fullmatch(name) is None or name.lower() == INDEX:
                raise ValueError(f"{name!r} is no name of a file beside the {INDEX}")

    @property
    def files(self) -> set[str]:
        """The names of all files, relative to the folder."""
        records = self.evidence and self.evidence.records
        others = [file.path for file in (self.timing_cache, self.kernels, records) if file]
        return {*(entry.file for entry in self.engines), *others}


def unit_name(first_segment: int, last_segment: int, exit_: int | None, variant: int = 0) -> str:
    """``00-12``, or ``00-03-exit1`` with an exit: how the store knows what becomes one engine.

    Those of the bundle's variants begin with its number: ``variant1-00-03-exit1``.
    """
    span = f"variant{variant}-" if variant else ""
    span += f"{first_segment:02d}-{last_segment:02d}"
    return span if exit_ is None else f"{span}-exit{exit_}"


def checkable_key(target: EngineTarget, parts: str) -> dict[str, str]:
    """Name what an engine's key must have, as far as a server can tell, which makes no graph again.

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
    """Hash the files of a bundle that a unit is made of, from the manifest alone.

    By it in an engine's key, a server can tell whether the engine is one of this bundle's parts.
    """
    manifest = manifest.of_variant(variant)
    names = [segment.file for segment in manifest.segments[first_segment : last_segment + 1]]
    if exit_ is not None:
        names.append(manifest.exits[exit_].file)
    elif len(names) == len(manifest.segments):
        names = [manifest.source.file]
    return _digest_of(manifest, names)


def model_digest(manifest: Manifest) -> str:
    """Hash what a policy that is certified of a bundle depends on: graphs, policy and records."""
    names = ["policy.json", "records.npz", manifest.source.file]
    names += [segment.file for segment in manifest.segments]
    names += [exit_.file for exit_ in manifest.exits]
    return _digest_of(manifest, names)


def kernels_stem(source: str) -> str:
    """Begin the name of kernels by their source's hash: those of others take other arguments."""
    return f"kernels-{source[:16]}"


def addressed(stem: str, content: bytes, suffix: str) -> FileEntry:
    """Describe a file of the store, whose name has its content's hash in it."""
    digest = hashlib.sha256(content).hexdigest()
    return entry_of(f"{stem}-{digest[:16]}{suffix}", content)


def _digest_of(manifest: Manifest, names: Iterable[str]) -> str:
    # A graph is what it is wherever its weights are: its own hash says nothing of those it names.
    hashes = {entry.path: entry.filled_sha256 or entry.sha256 for entry in manifest.files}
    return hashlib.sha256("\n".join(hashes[name] for name in names).encode()).hexdigest()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+|\.{2,}", "-", text.lower()).strip("-.")
