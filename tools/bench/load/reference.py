"""The inputs of a load: facts of the served model, samples, and the source model's answers."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, TensorSpec, UnreadInput
from offramp.calibration.data.data_sources import DataSource, NpzSource
from offramp.calibration.data.dataset import read_dataset
from offramp.calibration.data.key import GroupKey
from offramp.client import ModelMetadata, OfframpError
from offramp.engine.backends import make_backend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan
from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.request_log import UNKNOWN
from offramp.tools.bench.load.server_access import ServerAccess

_LIMIT_S: Final = 5.0


def check_server(address: str, model: str, access: ServerAccess) -> ModelMetadata:
    """Return the inputs and outputs of a model; LoadError if it does not accept requests."""
    with access.client(address, timeout_s=_LIMIT_S) as client:
        try:
            metadata = client.metadata(model)
            ready = client.model_ready(model)
        except OfframpError as error:
            raise LoadError(" ".join(str(error).split())) from error
    if not ready:
        raise LoadError(f"{address}: model {model!r} is not ready; wait until eeserve says so")
    return metadata


def optional_inputs(address: str, model: str, access: ServerAccess) -> frozenset[str]:
    """Return the inputs that requests may omit; LoadError if the server cannot be asked."""
    with access.client(address, timeout_s=_LIMIT_S) as client:
        try:
            return client.optional_inputs(model)
        except OfframpError as error:
            raise LoadError(" ".join(str(error).split())) from error


def input_specs(metadata: ModelMetadata) -> tuple[TensorSpec, ...]:
    """Return the shapes and types that data must have; each free size has its own symbol."""
    return tuple(
        TensorSpec(
            name=name,
            dtype=tensor.dtype.name,
            shape=tuple(
                size if size >= 0 else ("batch" if axis == 0 else f"{name}_{axis}")
                for axis, size in enumerate(tensor.shape)
            ),
        )
        for name, tensor in metadata.inputs.items()
    )


REFERENCE_KEY: Final = "reference"
"""Key of an optional array in a data file: the source model's classes, int64 [n]."""

_BATCH: Final = 16
_REFERENCE_SPEC: Final = TensorSpec(name=REFERENCE_KEY, dtype="int64", shape=("batch",))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadData:
    """Samples that the load generator sends, with their reference."""

    inputs: Mapping[str, NDArray[Any]]
    """Inputs by name; the first dimension is n."""
    reference: NDArray[np.int64] | None
    """[n]: the source model's classes, if the file has them."""
    sha256: str
    """SHA-256 hash of the data file."""

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


def read_data(
    source: Path | DataSource,
    specs: Sequence[TensorSpec],
    *,
    samples: int,
    optional: Collection[str] = (),
    group: GroupKey | None = None,
) -> LoadData:
    """Read the first samples of a source, at most ``samples``; DataError if they do not fit.

    The inputs that requests may omit (``optional``) are not sent, nor is the array that groups rows
    (``group``).
    """
    unread = [UnreadInput(spec=s, place=i) for i, s in enumerate(specs) if s.name in optional]
    specs = [spec for spec in specs if spec.name not in optional]
    path = source.path if isinstance(source, NpzSource) else source
    names = _names(path) if isinstance(path, Path) else []
    has_reference = f"{REFERENCE_KEY}.npy" in names and all(
        spec.name != REFERENCE_KEY for spec in specs
    )
    taken = [*specs, _REFERENCE_SPEC] if has_reference else specs
    dataset = read_dataset(source, taken, unread=unread, group=group)
    inputs = dataset.take(slice(samples))
    reference = inputs.pop(REFERENCE_KEY) if has_reference else None
    return LoadData(inputs=inputs, reference=reference, sha256=dataset.sha256)


def group_key(asked: str | None, reference: Bundle | None) -> GroupKey | None:
    """Return the key of the array that groups rows: the given one, or that of compiling.

    Data need not have the array that compiling used.
    """
    if asked is not None:
        return GroupKey(key=asked)
    known = None if reference is None else reference.manifest.calibration.distinct
    if known is None or known.key is None:
        return None
    return GroupKey(key=known.key, needed=False)


def _names(path: Path) -> list[str]:
    """Return the names of the arrays; empty if the file is not an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """The source model's answers, which served answers are compared with."""

    answer: str | None = None
    """Name of the output that is the answer; ``None`` compares nothing."""
    classes: NDArray[np.int64] | None = None
    """[n]: the source model's classes; ``UNKNOWN`` for samples that it did not run."""
    on_calibration_data: bool | None = None
    """True if the bundle was calibrated on the data; ``None`` if unknown."""


def given_reference(data: LoadData, metadata: ModelMetadata) -> Reference:
    """Return the classes in the data, if any; LoadError if their output is ambiguous."""
    if data.reference is None:
        return Reference()
    if len(metadata.outputs) != 1:
        raise LoadError(
            f"model {metadata.name!r} has the outputs {', '.join(metadata.outputs)}; only a bundle "
            f"says which one the array {REFERENCE_KEY!r} belongs to: give --reference"
        )
    return Reference(answer=next(iter(metadata.outputs)), classes=data.reference)


def ask_source(
    bundle: Bundle,
    data: LoadData,
    rows: NDArray[np.int64],
    *,
    served: ModelMetadata,
    progress: Callable[[int], None] = lambda _: None,
) -> Reference:
    """Run the source model of the served bundle in this process, in one thread, on some rows.

    ``progress`` is called with the number of samples of each batch.

    Raises:
        LoadError: The bundle contains another model.
        BackendError: The model cannot be run.
    """
    ours = {spec.name for spec in (*bundle.manifest.declared, *bundle.manifest.outputs)}
    theirs = {*served.inputs, *served.outputs}
    if ours != theirs:
        raise LoadError(
            f"{bundle.path} has the tensors {', '.join(sorted(ours))}, the served model "
            f"{served.name!r} {', '.join(sorted(theirs))}; give the bundle that is served "
            "as --reference"
        )
    if (kind := bundle.manifest.answer.task.kind) != "classification":
        raise LoadError(
            f"{bundle.path} is for {kind}, and answers to a load are compared by class only, so "
            "far; leave --reference out, and compare by eecompile verify"
        )
    pipeline = Pipeline(make_backend("onnxruntime"), make_plan(bundle, mode=Mode.OFF))
    slot = pipeline.backend.open_slot()
    classes = np.full(len(data), UNKNOWN, np.int64)
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        tensors = {name: array[batch] for name, array in data.inputs.items()}
        for departure in pipeline.run(slot, tensors):
            classes[batch[departure.rows]] = departure.answer.argmax(axis=1)
        progress(len(batch))
    slot.close()
    same_data = data.sha256 == bundle.manifest.calibration.data_sha256
    return Reference(
        answer=bundle.manifest.answer.output, classes=classes, on_calibration_data=same_data
    )
