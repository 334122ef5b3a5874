"""Finding groups of rows that count as one sample each, also in later data for a bundle."""

from __future__ import annotations

import logging
from pathlib import Path

from offramp.bundle import Manifest
from offramp.bundle.schema.compilation import COPIES_WITHIN, DistinctSamples
from offramp.bundle.schema.manifest import Calibration
from offramp.calibration.data.data_sources import DataSource, data_name
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.groups import Groups
from offramp.calibration.groups.find_groups import find_groups

_log = logging.getLogger(__name__)


def grouped(dataset: Dataset, data: Path | DataSource, *, within: float = COPIES_WITHIN) -> Groups:
    """Group the rows of a data set, and warn if some of them are copies of others."""
    groups = find_groups(dataset, within=within)
    if groups.joins:
        _log.warning(
            "%s: %s rows hold %s distinct samples: %s. Each distinct sample belongs to only one "
            "data split, and counts once in the certificate.",
            data_name(data), f"{groups.rows:,}", f"{len(groups):,}", "; ".join(groups.found),
        )  # fmt: skip
    return groups


def distinct_samples(groups: Groups, *, key: str | None, within: float) -> DistinctSamples | None:
    """Return the manifest's entry for groups; ``None`` if all rows are distinct without a key."""
    if not groups.joins and key is None:
        return None
    return DistinctSamples(
        rows=groups.rows, samples=len(groups), found=groups.found, key=key, within=within
    )


def groups_again(manifest: Manifest, dataset: Dataset) -> Groups:
    """Group the rows of new data for a bundle in the same way as its calibration data.

    If all calibration rows were distinct, the same data is not grouped; other data is grouped with
    the default of ``--copies-within``.
    """
    calibration = manifest.calibration
    if calibration.distinct is not None:
        return find_groups(dataset, within=calibration.distinct.within)
    if dataset.sha256 == calibration.data_sha256:
        return Groups.singletons(len(dataset))
    return find_groups(dataset, within=COPIES_WITHIN)


def may_be_of(calibration: Calibration, groups: Groups) -> bool:
    """Return whether a bundle may be made with this data: rows and groups are equally many."""
    known = calibration.distinct
    if known is not None:
        return (known.rows, known.samples) == (groups.rows, len(groups))
    counts = (calibration.train_samples, calibration.tune_samples, calibration.certify_samples)
    return sum(counts) == groups.rows
