"""Checks of resources: memory, descriptors, threads, slots, and closing the backend."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offramp.engine.backends import Backend, Slot
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.self_check.check_results import CheckFailedError, Facts, TimeLimit
from offramp.engine.self_check.subject import CheckSubject, take

_PROCESS = Path("/proc/self")
_QUARTERS = 4
_LOOKS = 3
_MOST_ROUNDS = 250
"""Largest number of rounds in a quarter of a check."""
_LEAST_RESIDENT_BYTES = 4 << 20
"""Smallest total growth, in bytes, that exceeds the noise of the host's allocators."""
_WARM_UPS = 3
"""Runs of every batch size: the third one launches a graph."""
_CYCLES = 3


class ResourceUsage(NamedTuple):
    """Resources of the process; ``None`` where the system does not report them."""

    device_bytes: int | None
    """Bytes used on the device, by all processes."""
    resident_bytes: int | None
    descriptors: int | None
    threads: int | None


def usage_of(backend: Backend) -> ResourceUsage:
    """Measure the resources, after collecting Python's garbage."""
    gc.collect()
    device_bytes = None
    if isinstance(backend, CudaBackend):
        with backend.driver.current():
            free_bytes, total_bytes = backend.driver.memory()
        device_bytes = total_bytes - free_bytes
    if not (_PROCESS / "statm").exists():
        return ResourceUsage(device_bytes, None, None, None)
    pages = int((_PROCESS / "statm").read_text().split()[1])
    return ResourceUsage(
        device_bytes,
        pages * os.sysconf("SC_PAGE_SIZE"),
        sum(1 for _ in (_PROCESS / "fd").iterdir()),
        sum(1 for _ in (_PROCESS / "task").iterdir()),
    )


def check_memory(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Run rounds of batches of all sizes: memory, descriptors and threads must not grow.

    Only a leak makes memory grow in every quarter of the rounds. Apparent growth is measured again,
    because allocators need time to reach their final size.
    """
    with subject.slot() as slot:
        for index in range(_WARM_UPS * len(subject.sizes)):
            _round(subject, slot, index)
        began_s = time.monotonic()
        for index in range(len(subject.sizes)):
            _round(subject, slot, index)
        round_s = (time.monotonic() - began_s) / len(subject.sizes)
        rounds = _rounds(subject, limit, round_s)
        for _ in range(_LOOKS):
            seen = _over_quarters(subject, slot, rounds)
            if not _growing(seen):
                break
    facts = _facts(seen, rounds=_QUARTERS * rounds)
    _refuse_growth(seen, f"{_QUARTERS * rounds} rounds", facts)
    return facts


def _over_quarters(subject: CheckSubject, slot: Slot, rounds: int) -> list[ResourceUsage]:
    seen = [usage_of(subject.backend)]
    for _ in range(_QUARTERS):
        for index in range(rounds):
            _round(subject, slot, index)
        seen.append(usage_of(subject.backend))
    return seen


def check_close(backend: Backend, subjects: Sequence[CheckSubject], _limit: TimeLimit) -> Facts:
    """Open, use and close slots, then close the backend: all resources must be released."""
    seen = []
    for _ in range(1 + _CYCLES):
        for subject in subjects:
            inputs = take(subject.samples, slice(0, min(2, subject.max_rows)))
            with subject.slot() as slot:
                for _ in range(_WARM_UPS):
                    subject.answers(slot, inputs)
        seen.append(usage_of(backend))
    facts = _facts(seen, slots=len(seen) * len(subjects))
    for subject in subjects:
        subject.release()
    gc.collect()
    try:
        backend.close()
    except Exception as error:
        raise CheckFailedError(f"the backend cannot be closed: {error}", facts) from error
    # The resident memory of few slots is noise; check_memory measures it over many rounds.
    seen = [usage._replace(resident_bytes=None) for usage in seen]
    _refuse_growth(seen, "slots that were opened, used and closed", facts)
    return facts


def _rounds(subject: CheckSubject, limit: TimeLimit, round_s: float) -> int:
    """Return the number of rounds in a quarter of a check: at least two of each batch size."""
    fitting = int(limit.left_s / max(round_s, 1e-6)) // _QUARTERS
    return max(2 * len(subject.sizes), min(fitting, _MOST_ROUNDS))


def _round(subject: CheckSubject, slot: Slot, index: int) -> None:
    """Run a batch to its end, and another whose rows are buffered and merged between stages."""
    size = subject.sizes[index % len(subject.sizes)]
    inputs = take(subject.samples, slice(0, size))
    for _ in subject.some_exiting.run(slot, inputs):
        pass
    if len(subject.stages) > 1:
        carry = subject.before(slot, inputs, 1)
        part = slot.buffer(carry, np.arange(size))
        merged = slot.merge([(part, np.arange(size))])
        slot.run(subject.stages[1], merged)


def _facts(seen: Sequence[ResourceUsage], **more: int) -> Facts:
    return {**more, "seen": [usage._asdict() for usage in seen]}


def _refuse_growth(seen: Sequence[ResourceUsage], what: str, facts: Facts) -> None:
    for name, values in _growing(seen).items():
        words = name.replace("_", " ")
        raise CheckFailedError(
            f"{words} grew steadily over {what}: {', '.join(map(str, values))}", facts
        )


def _growing(seen: Sequence[ResourceUsage]) -> dict[str, list[int]]:
    """Return the resources that grew at every measurement, by name, with their values."""
    found = {}
    for name in ResourceUsage._fields:
        values = [getattr(usage, name) for usage in seen]
        if None in values:
            continue
        grew = all(after > before for before, after in pairwise(values))
        least = _LEAST_RESIDENT_BYTES if name == "resident_bytes" else 1
        if grew and values[-1] - values[0] >= least:
            found[name] = values
    return found
