"""Worker that runs a campaign in this process: ``python -m tests.fuzz.worker NAME …``.

A case may end the process that reads it (a crash of native code, exhausted memory, an endless
loop), so a worker runs it, and its starter reads the last case from a file.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import os
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz.campaign import KEPT, Campaign, WrongError, make_campaign

SLOWEST_S: Final = 60
"""A case that takes longer hangs, on however busy a machine."""
_TELL_S: Final = 0.5
_LONGEST: Final = 20_000
"""Bytes of a case that others are made of."""
MEMORY_BYTES: Final = 8 * 2**30
"""Address space of a worker."""


def signature(error: BaseException) -> str:
    """Return the identity of a finding: the class, and the last place in our own code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/offramp/" in frame.filename or "/tests/" in frame.filename
    ]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    text = str(error) if isinstance(error, WrongError) else ""
    return f"{type(error).__name__} in {place}{': ' if text else ''}{text[:200]}"


class Worker:
    """Feeds cases until the time is over or there were enough; tells counts and findings."""

    def __init__(self, campaign: Campaign, *, seed: int, current: Path, corpus: Path | None):
        self._campaign = campaign
        self._random = Random(seed)
        self._corpus = corpus
        self._kept = list(campaign.seeds())
        self._seen: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._current = os.open(current, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def run(self, *, seconds: float, count: int) -> None:
        """Feed that many: first what the corpus has, which is kept as far as it tells outcomes."""
        ends_s, told_s = time.monotonic() + seconds, 0.0
        known = iter(_read(self._corpus))
        for _ in range(count):
            now_s = time.monotonic()
            if now_s > ends_s:
                break
            if now_s > told_s + _TELL_S:
                self._tell_counts()
                told_s = now_s
            self._feed(next(known, None) or self._mutated())
        self._tell_counts()

    def _mutated(self) -> bytes:
        case = self._random.choice(self._kept)
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            case = self._campaign.mutate(case, self._random)
        return case

    def _feed(self, case: bytes) -> None:
        os.ftruncate(self._current, 0)
        os.pwrite(self._current, case, 0)
        try:
            outcome = self._campaign.check(case)
        except Exception as error:
            outcome = "WRONG"
            trace = "".join(traceback.format_exception(error)[-4:])[-1500:]
            _tell(finding=signature(error), case=case.hex(), trace=trace)
        self._counts[outcome.partition(":")[0]] += 1
        if outcome not in self._seen and len(self._seen) < KEPT and len(case) < _LONGEST:
            self._seen.add(outcome)
            self._kept.append(case)
            _keep(self._corpus, case)

    def _tell_counts(self) -> None:
        """Report counts, and set a timeout for the next case that ends the process."""
        _tell(counts=self._counts)
        self._counts.clear()
        faulthandler.dump_traceback_later(SLOWEST_S, exit=True)


def _read(corpus: Path | None) -> list[bytes]:
    if corpus is None or not corpus.is_dir():
        return []
    return [place.read_bytes() for place in sorted(corpus.iterdir())]


def _keep(corpus: Path | None, case: bytes) -> None:
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / hashlib.sha256(case).hexdigest()[:16]).write_bytes(case)


def _tell(**what: object) -> None:
    sys.__stdout__.write(f"{json.dumps(what)}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def main() -> None:
    """Feed as told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--current", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    campaign = make_campaign(given.name)
    worker = Worker(campaign, seed=given.seed, current=given.current, corpus=given.corpus)
    worker.run(seconds=given.seconds, count=given.count)
    campaign.close()


if __name__ == "__main__":
    main()
