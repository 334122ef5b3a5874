"""Conversion of a cluster file and measured profiles to devices with times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offramp.bundle import Profile
from offramp.cluster.planning.cluster import Cluster, DeviceTimes, DeviceType
from offramp.cluster.planning.cluster_file import ClusterFile, ClusterFileError
from offramp.engine.scheduling import stage_seconds


def make_cluster(
    file: ClusterFile, own: Profile, profiles: Mapping[str, Profile], most_rows: int
) -> Cluster:
    """Return a cluster with times up to batches of ``most_rows``.

    ``own`` is the bundle's profile. ``profiles`` has the profiles of the same bundle on other
    devices, by the names in the file.
    """
    types = []
    for entry in file.devices:
        profile = own if entry.profile is None else profiles[entry.profile]
        if (found := _parts(profile)) != (expected := _parts(own)):
            raise ClusterFileError(
                f"[devices.{entry.name}] profile = {entry.profile!r}: has {found[0]} segments "
                f"and {found[1]} exits, expected {expected[0]} and {expected[1]}; measure this "
                "bundle on that device (eecompile profile)"
            )
        types.append(
            DeviceType(
                name=entry.name,
                count=entry.count,
                cost_per_hour=entry.cost_per_hour,
                times=times_of(profile, most_rows, speed=entry.speed or 1.0),
                memory_bytes=entry.memory_bytes,
            )
        )
    return Cluster(types=tuple(types), link=file.link, links=file.links)


def times_of(profile: Profile, most_rows: int, *, speed: float = 1.0) -> DeviceTimes:
    """Return the seconds of a profile's segments and exits by batch size, divided by ``speed``."""
    segments, exits = _parts(profile)
    rows = [(k, k, None) for k in range(segments)]
    plain = np.array(stage_seconds(profile, rows, most_rows))
    ended = np.array(stage_seconds(profile, [(0, 0, e) for e in range(exits)], most_rows))
    added = ended.reshape(exits, most_rows + 1) - plain[0]
    return DeviceTimes(segments_s=plain / speed, exits_s=np.maximum(added, 0.0) / speed)


def _parts(profile: Profile) -> tuple[int, int]:
    return len(profile.segments_ms), len(profile.exits_ms)
