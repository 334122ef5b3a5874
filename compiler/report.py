"""``report.html`` (placeholder while being written)."""

from __future__ import annotations

from offramp.bundle import ExitPolicy, Manifest, Profile
from offramp.calibration.records import ExitRecords


def render_report(
    manifest: Manifest,
    policy: ExitPolicy,
    profile: Profile,
    certify: ExitRecords,
) -> str:
    """Render."""
    return f"<html><body>{manifest.name}</body></html>"
