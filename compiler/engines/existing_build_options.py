"""Options for building next to a server: the sizes and settings of the engines it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from offramp.bundle import Manifest
from offramp.bundle.engines import EngineEntry, EngineStore, ShapeProfile
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.build_options import EngineBuildOptions, SizeRange
from offramp.compiler.engines.profiles import Sizes, symbols_of

WORKSPACE_BYTES: Final = 2**30
"""Limit on TensorRT's scratch memory in bytes next to a server, which needs free memory for
batches."""


def existing_build_options(
    manifest: Manifest, store: EngineStore, asked: EngineBuildOptions
) -> tuple[EngineBuildOptions, tuple[Sizes, ...]]:
    """Return the options and sizes that the engines of a store were built with.

    The workspace is at most :data:`WORKSPACE_BYTES`. EngineOptionsError if there is no engine.
    """
    symbols = symbols_of(manifest)
    model = [(entry, _dimensions(manifest, entry)) for entry in store.index.engines]
    whole = [entry for entry, found in model if found.keys() == symbols.keys()]
    if not whole:
        raise EngineOptionsError(
            f"--while-serving builds like the existing engines, and {store.bundle_path} has "
            f"none for {store.index.target.describe()} that take the model's inputs; build it "
            "without --while-serving first"
        )
    entry = whole[0]
    dimensions = _dimensions(manifest, entry)
    sizes = tuple(_sizes(profile, dimensions) for profile in entry.profiles)
    workspace = entry.key.get("workspace", "").removesuffix(" bytes")
    engines = replace(
        asked,
        optimization_level=int(entry.key.get("optimization_level", asked.optimization_level)),
        workspace_bytes=min(int(workspace) if workspace.isdigit() else WORKSPACE_BYTES,
                            WORKSPACE_BYTES),
    )  # fmt: skip
    return engines, sizes


def _dimensions(manifest: Manifest, entry: EngineEntry) -> dict[str, tuple[str, int]]:
    """Return, for each symbolic size, an input of the engine and the dimension with that size."""
    symbols, found = symbols_of(manifest), {}
    for spec in manifest.inputs:
        for place, name in enumerate(spec.shape):
            if isinstance(name, str) and name in symbols and spec.name in entry.profiles[0].inputs:
                found[name] = (spec.name, place)
    return found


def _sizes(profile: ShapeProfile, dimensions: dict[str, tuple[str, int]]) -> Sizes:
    others = {}
    for name, (tensor, place) in dimensions.items():
        shapes = profile.inputs[tensor]
        others[name] = SizeRange(shapes.least[place], shapes.most[place])
    return Sizes(batch=SizeRange(profile.first_batch, profile.last_batch), others=others)
