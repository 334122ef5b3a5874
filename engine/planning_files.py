"""Reads the files that plans are made of, which others than us may have written."""

from __future__ import annotations

from pathlib import Path

from offramp.bundle import Profile
from offramp.bundle.files import parse_json
from offramp.bundle.npz import open_regular
from offramp.bundle.profile import upgraded
from offramp.bundle.serde import from_plain
from offramp.engine.planning.batch_profile import MOST_PROFILE_BYTES
from offramp.engine.planning.cluster_file import ClusterFile
from offramp.engine.planning.cluster_plan import PlanError


def read_limited(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes; PlanError says in a line why it cannot be."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be read: {error.strerror}; name a file that is there"
        ) from error
    if len(content) > most:
        raise PlanError(f"{path}: has more than {most:,} bytes; is it the file that was meant?")
    return content


def read_profiles(cluster: ClusterFile, folder: Path) -> dict[str, Profile]:
    """Read the profiles that a cluster file names, relative to its folder.

    PlanError if one cannot be read; BundleSchemaError if it is none.
    """
    named = {entry.profile for entry in cluster.devices if entry.profile is not None}
    return {name: _read_profile(folder / name) for name in named}


def _read_profile(path: Path) -> Profile:
    plain = parse_json(read_limited(path, MOST_PROFILE_BYTES), str(path))
    return from_plain(Profile, upgraded(plain), str(path))
