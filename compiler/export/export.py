"""Write a bundle as one ONNX file: the same answers at the same exits, without Offramp.

The steps are: read the bundle, nest its stages (:mod:`offramp.compiler.export.nesting`), compare
the result with the bundle on every sample (:mod:`offramp.compiler.export.export_verification`), and
write the file and the model repositories that contain it
(:mod:`offramp.compiler.export.repositories`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from offramp import __version__
from offramp.bundle import Bundle
from offramp.bundle.bundle import REPORT
from offramp.bundle.files import FileContent, check_writable, write_whole
from offramp.bundle.graph_weights import MOST_BYTES, WEIGHTS, filled_size
from offramp.calibration.data.data_sources import DataSource
from offramp.calibration.data.dataset import read_samples
from offramp.compiler.common.errors import ExportError
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.export.export_verification import Verified, verify
from offramp.compiler.export.model_folder import model_files
from offramp.compiler.export.nesting import METADATA, Names, nest
from offramp.compiler.export.repositories import (
    MODEL,
    Repository,
    RepositoryOptions,
    check_model,
    repositories,
)
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.source_model import with_unread
from offramp.compiler.graphs.weights import check_standard, filled, renamed_file
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.external_weights import weights_in
from offramp.engine.models.whole_promise import end_evidence, whole_policy
from offramp.engine.stages.plan import Plan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of one run of ``eecompile export``."""

    bundle: Path
    data: Path | DataSource | None
    """Samples to verify with: the bundle's calibration data."""
    output: Path | None = None
    """File to write; not needed if a model repository is written."""
    repositories: RepositoryOptions = field(default_factory=RepositoryOptions)
    overwrite: bool = False
    with_exits: bool = False
    """True to add outputs for the index of the exit and the confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported file, and the result of its verification."""

    path: Path | None
    """Path of the single file, if one was asked for."""
    repositories: tuple[Repository, ...]
    """Model repositories that also contain the file."""
    size_bytes: int
    plan: Plan
    names: Names
    with_exits: bool
    verified: Verified
    calibration_data: bool
    """True if the bundle was calibrated on the data that it was verified with."""


def export_bundle(options: ExportOptions, progress: Progress = SILENT) -> Exported:
    """Export a bundle, verify the file, and write it.

    Raises:
        BundleError, DataError: There is no bundle, it is damaged, or the data does not fit it.
        ExportError: No exit is active, no data is given, or the target may not be written.
        VerificationError: Results of the file differ from the bundle's; nothing is written.
    """
    bundle = open_runnable(options.bundle)
    criterion = bundle.manifest.answer.criterion
    if criterion.on_host:
        raise ExportError(
            f"{options.bundle}: the criterion {criterion.name} is computed by the host, but an "
            "export only has graphs; compile with --criterion entropy, margin or learned"
        )
    if bundle.manifest.calibration.random_inputs:
        raise ExportError(
            f"{options.bundle} was compiled on random inputs, so its exits would return wrong "
            "answers; compile the model on samples: eecompile "
            f"{bundle.manifest.source.original_name} --data DATA"
        )
    plan = make_plan(bundle)
    places = repositories(options.repositories, options.bundle)
    data = _check(bundle, plan, options, places)
    _check_opsets(options.bundle, plan)
    dataset = read_samples(data, bundle.manifest)
    names = Names.of(bundle.manifest, plan)
    large, weights = _is_large(plan), plan.stages[0].load_light().weights
    if large and options.output is not None:
        _check_output(_data_of(options.output), options)
    explained = make_model(bundle, plan, names, with_exits=True)
    models = {"the export with exits": explained}
    if not options.with_exits:
        models["the export"] = make_model(bundle, plan, names, with_exits=False)
    *_, model = models.values()
    runs = (1 + len(models)) * len(dataset)
    try:
        with progress.step("Compare with the bundle", runs) as advance:
            verified = verify(
                plan,
                models,
                names,
                dataset,
                unread=bundle.manifest.unread_names,
                weights=weights,
                tolerance=bundle.manifest.verified_tolerance,
                progress=advance,
            )
    except BackendError as error:
        raise ExportError(f"{options.bundle} cannot be run: {error}") from error
    whole = None if large else _whole(model, weights)
    if options.output is not None:
        _write(options.output, _files(bundle, model, whole, options.output.name))
    for place in places:
        content = _files(bundle, model, whole, MODEL)
        place.write(model_files(bundle, place, model, content, names))
    return Exported(
        path=options.output,
        repositories=places,
        size_bytes=model.ByteSize() + _weight_bytes(bundle) if whole is None else len(whole),
        plan=plan,
        names=names,
        with_exits=options.with_exits,
        verified=verified,
        calibration_data=dataset.sha256 == bundle.manifest.calibration.data_sha256,
    )


def _is_large(plan: Plan) -> bool:
    """Return whether all stages with their weights are too large for one protobuf message."""
    graphs = [stage.load_light().model for stage in plan.stages]
    return sum(map(filled_size, graphs)) > MOST_BYTES


def _weight_bytes(bundle: Bundle) -> int:
    return next(e.size_bytes for e in bundle.manifest.files if e.path == WEIGHTS)


def _data_of(model: Path) -> Path:
    """Return the path of the weight file next to a model whose weights are not inside it."""
    return model.with_name(f"{model.name}.data")


def _whole(model: onnx.ModelProto, weights: Path | None) -> bytes:
    """Serialise a model with its weights; these are read from ``weights`` if they are in files."""
    if weights is None:
        return serialised(model)
    with weights_in(weights):
        return serialised(filled(model))


def _files(
    bundle: Bundle, model: onnx.ModelProto, whole: bytes | None, name: str
) -> dict[str, FileContent]:
    """Return a model's files by name: the ``whole`` model, or a weight file and then the model.

    Weights come first, so that a written model always has its weights, even if writing is
    interrupted.
    """
    if whole is not None:
        return {name: whole}
    data = _data_of(Path(name))
    graph = serialised(renamed_file(model, data.name))
    return {data.as_posix(): bundle.stored(WEIGHTS), name: graph}


def make_model(bundle: Bundle, plan: Plan, names: Names, *, with_exits: bool) -> onnx.ModelProto:
    """Make the exported model, checked by ONNX's checker.

    Its weights are in a separate file if those of the bundle's graphs are.
    """
    source = onnx.load_model_from_string(bundle.graph(bundle.manifest.source.file))
    nested = nest(plan, source, names, with_exits=with_exits)
    model = with_unread(nested, bundle.manifest.unread)
    model.producer_name, model.producer_version = "offramp", __version__
    kept = {p.key: p.value for p in source.metadata_props if not p.key.startswith(METADATA)}
    ours = _metadata(bundle, plan, names, with_exits=with_exits)
    onnx.helper.set_model_props(model, kept | ours)
    check_standard(model)
    return model


def _metadata(bundle: Bundle, plan: Plan, names: Names, *, with_exits: bool) -> dict[str, str]:
    """Return the file's metadata; values of more than one word are JSON."""
    manifest = bundle.manifest
    promise = whole_policy(bundle.policy, end_evidence(bundle)).promise
    exits = [
        {"exit": stage.exit, "after_segment": stage.last_segment, "threshold": stage.threshold}
        | {"threshold_input": name}
        for stage, name in zip(plan.stages[:-1], names.thresholds, strict=True)
    ]
    said = {
        "version": __version__,
        "source": manifest.source.original_name,
        "source_sha256": manifest.source.original_sha256,
        "policy_version": str(bundle.policy.version),
        "exits": json.dumps(exits),
    }
    if promise is not None:
        said["promise"] = json.dumps(
            {"max_disagreement": promise.max_disagreement, "confidence": promise.confidence_level}
        )
    if with_exits:
        said |= {"exit_output": names.exit, "confidence_output": names.confidence}
    return {f"{METADATA}{key}": value for key, value in said.items()}


def _check(
    bundle: Bundle, plan: Plan, options: ExportOptions, places: Sequence[Repository]
) -> Path | DataSource:
    """Raise ExportError for unsuitable bundles or targets; return the data to verify with."""
    if len(plan.stages) == 1:
        raise ExportError(
            f"{options.bundle} has no active exit, so that an export would be the source model: "
            f"compile it with more data or another --max-disagreement; {REPORT} in it has the "
            "reason"
        )
    if (kind := bundle.manifest.answer.task.kind) != "classification":
        raise ExportError(
            f"{options.bundle} is for {kind}, but only classification can be exported as one file "
            "with exits, so far; serve the bundle"
        )
    if options.output is not None:
        _check_output(options.output, options)
    elif not places:
        raise ExportError(
            "there is nothing to write: add --output FILE.onnx for one file, or --triton DIR or "
            "--ovms DIR for a model repository of a server"
        )
    if places:
        check_model(bundle.manifest, options.bundle)
    for place in places:
        place.check(options.bundle, overwrite=options.overwrite)
    if options.data is None:
        raise ExportError(
            "an export is verified before it is written, on the calibration data, which a bundle "
            f"does not contain: add --data DATA, the data that {options.bundle} was compiled with"
        )
    return options.data


def _check_output(output: Path, options: ExportOptions) -> None:
    """Raise ExportError for a file that cannot or must not be written."""
    if output.resolve().is_relative_to(options.bundle.resolve()):
        raise ExportError(
            f"{output} is inside the bundle, which it would damage; choose another --output"
        )
    for folder in output.parents:
        if folder.exists() and not folder.is_dir():
            raise ExportError(f"{folder} is not a folder; choose another --output")
    if output.is_dir():
        raise ExportError(f"{output} is a folder; --output names a file, such as fast.onnx")
    if not options.overwrite and (output.exists() or output.is_symlink()):
        raise ExportError(f"{output} exists; choose another --output, or add --overwrite")
    check_writable(output)


def _check_opsets(path: Path, plan: Plan) -> None:
    """Raise ExportError for stages of different opsets: a file has one opset for each domain."""
    imports: dict[str, set[int]] = {}
    for stage in plan.stages:
        for opset in onnx.load_model_from_string(stage.load_light().model).opset_import:
            imports.setdefault("" if opset.domain == "ai.onnx" else opset.domain, set()).add(
                opset.version
            )
    for domain, versions in imports.items():
        if len(versions) > 1:
            raise ExportError(
                f"{path} has stages of opsets {sorted(versions)} of {domain or 'ai.onnx'}, but a "
                "file has only one: the int8 copy has another opset than the model; export the "
                f"model with opset {max(versions)} and compile it again, or with --precision fp32"
            )


def _write(target: Path, files: Mapping[str, FileContent]) -> None:
    """Write files under temporary names and rename them, so that each is complete or absent."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(target.with_name(name), content, durable=False, mode=0o644)
    except OSError as error:
        raise ExportError(
            f"{target} cannot be written: {error}; free the space or choose another --output"
        ) from error
