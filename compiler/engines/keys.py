"""What an engine depends on, and what has changed since it was built."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from offramp.bundle.engine_index import checkable_key
from offramp.bundle.engines import EngineTarget, ShapeProfile
from offramp.compiler.engines.builder import BuildSettings

_WORDS = {
    "tensorrt": "TensorRT",
    "gpu": "GPU",
    "compute_capability": "compute capability",
    "precision": "precision",
    "batches": "batches",
    "optimization_level": "optimization level",
    "workspace": "workspace",
    "builder": "Offramp's builder revision",
}
"""Facts whose values say something to a reader; of others only that they changed."""


def engine_key(
    target: EngineTarget,
    settings: BuildSettings,
    graph: bytes,
    profiles: Sequence[ShapeProfile],
    *,
    parts: str,
) -> dict[str, str]:
    """Name everything that an engine depends on; equal keys mean that it need not be built.

    Args:
        target: What is built for.
        settings: How.
        graph: What of, in the target's precision.
        profiles: For which shapes.
        parts: Hash of the bundle's files that the graph is made of.
    """
    workspace = settings.workspace_bytes
    batches = dict.fromkeys((p.first_batch, p.last_batch) for p in profiles)
    return {
        **checkable_key(target, parts),
        "graph": hashlib.sha256(graph).hexdigest(),
        "batches": ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in batches),
        "profiles": "; ".join(map(_describe, profiles)),
        "optimization_level": str(settings.optimization_level),
        "workspace": "all free memory" if workspace is None else f"{workspace} bytes",
    }


def differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Say what an engine was built with and what is asked for now; empty if all is equal."""
    names = dict.fromkeys([*wanted, *stored])
    changed = [name for name in names if stored.get(name) != wanted.get(name)]
    # The first of each says what the second does, which follows from it.
    for first, second in (("batches", "profiles"), ("parts", "graph")):
        if first in changed and second in changed:
            changed.remove(second)
    return ", ".join(_difference(name, stored, wanted) for name in changed)


def _difference(name: str, stored: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    if name in ("graph", "parts"):
        return "its graph has changed"
    if name == "profiles":
        return "the shapes of its profiles have changed"
    before, now = stored.get(name, "nothing"), wanted.get(name, "nothing")
    return f"built for {_WORDS.get(name, name)} {before}, now it is {now}"


def _describe(profile: ShapeProfile) -> str:
    return " ".join(
        f"{name} {list(s.least)} {list(s.best)} {list(s.most)}"
        for name, s in sorted(profile.inputs.items())
    )
