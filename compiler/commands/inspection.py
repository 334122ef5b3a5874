"""What ``eecompile inspect`` tells, of models and of bundles, as plain data for ``--json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offramp.bundle import Bundle
from offramp.bundle.engines import list_targets
from offramp.bundle.schema.serde import to_plain

if TYPE_CHECKING:
    from offramp.compiler.cuts.cut_points import CutAnalysis
    from offramp.compiler.graphs.source_model import SourceModel


def describe_model(model: SourceModel, analysis: CutAnalysis) -> dict[str, Any]:
    """Describe a model, its cut points, and the places where none are.

    Where the work of operators had to be measured, shares of FLOPs are shares of that time.
    """
    return {
        "model": model.name,
        "opset": model.opset,
        "gflops": None if analysis.total_s is not None else analysis.total_flops / 1e9,
        "measured_s": analysis.total_s,
        "unknown_work": list(analysis.unknown_work),
        "inputs": [to_plain(spec) for spec in model.declared],
        "unread_inputs": [each.spec.name for each in model.unread],
        "main_inputs": list(analysis.main_inputs),
        "rereads": analysis.rereads,
        "answer": to_plain(model.answer),
        "cut_points": [asdict(cut) for cut in analysis.cuts],
        "rejected": [asdict(place) for place in analysis.rejected],
    }


def describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """Describe a bundle: its manifest without the list of files, policy, profile, and engines."""
    manifest = to_plain(bundle.manifest)
    del manifest["files"]
    measured = bundle.measured()
    return {
        "bundle": bundle.path.name,
        "manifest": manifest,
        "policy": to_plain(bundle.policy),
        "profile": to_plain(bundle.profile()),
        "measured": None if measured is None else to_plain(measured),
        "engines": [to_plain(target) for target in list_targets(bundle.path)],
    }
