"""Reads the files for planning, which are not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from offramp.bundle import Profile
from offramp.bundle.files import parse_json, read_limited
from offramp.bundle.schema.serde import from_plain
from offramp.cluster.planning.batch_profile import MOST_PROFILE_BYTES
from offramp.cluster.planning.cluster_file import ClusterFile
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlanError, parse_plan

_MOST_PLAN_BYTES: Final = 16 << 20


def read_planning(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``; else raise PlanError."""
    try:
        return read_limited(path, most_bytes)
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be read: {error.strerror}; name an existing file"
        ) from error


def read_plan(path: Path) -> ClusterPlan:
    """Read a plan that ``eecompile plan --json`` wrote; PlanError if the file is not a plan."""
    content = read_planning(path, _MOST_PLAN_BYTES)
    return parse_plan(content.decode(errors="replace"), str(path))


def read_profiles(cluster: ClusterFile, folder: Path) -> dict[str, Profile]:
    """Read the profiles that a cluster file names, relative to its folder.

    PlanError if a file cannot be read; BundleSchemaError if it is not a profile.
    """
    named = {entry.profile for entry in cluster.devices if entry.profile is not None}
    return {name: _read_profile(folder / name) for name in named}


def _read_profile(path: Path) -> Profile:
    plain = parse_json(read_planning(path, MOST_PROFILE_BYTES), str(path))
    return from_plain(Profile, plain, str(path))
