"""Runs campaigns, each where a crash of what it feeds does no harm, and counts their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.fuzz.campaign import CAMPAIGNS

NAMES: Final = (*CAMPAIGNS, "bundle", "server")


@dataclass(slots=True, kw_only=True)
class CampaignResult:
    """Outcome of the cases of a campaign."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, bytes] = field(default_factory=dict)
    """Defects, each with the first case that showed it."""
    traces: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The outcome as text."""
        total = self.counts.total()
        yield (
            f"{self.name}: {total:,} cases in {self.seconds:.0f} s "
            f"({total / max(self.seconds, 1e-9):,.0f}/s), {len(self.findings)} findings"
        )
        yield from (f"  {count:>9,}  {what}" for what, count in sorted(self.counts.items()))
        yield from (f"  {remark}" for remark in self.remarks)
        for what in self.findings:
            yield f"  FOUND {what}"
            yield from (f"      {line}" for line in self.traces.get(what, "").splitlines()[-4:])


def run(name: str, *, seed: int, seconds: float, count: int, folder: Path) -> CampaignResult:
    """Run a campaign; what it finds is kept in ``folder``."""
    result = CampaignResult(name=name)
    began_s = time.monotonic()
    if name == "server":
        _run_server(result, seed=seed, seconds=seconds, count=count)
    elif name == "bundle":
        _run_bundles(result, seed=seed, seconds=seconds, count=count)
    else:
        _run_workers(result, seed=seed, seconds=seconds, count=count, folder=folder)
    result.seconds = time.monotonic() - began_s
    for what, case in result.findings.items():
        _keep(folder / "findings", name, what, case)
    return result


def _keep(folder: Path, name: str, what: str, case: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}-{hashlib.sha256(case).hexdigest()[:10]}"
    place.write_bytes(case)
    place.with_suffix(".txt").write_text(f"{what}\n")


def _run_workers(
    result: CampaignResult, *, seed: int, seconds: float, count: int, folder: Path
) -> None:
    """One worker after the other: a new one where a case has ended the last."""
    ends_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        current = Path(scratch) / "case"
        for number in range(1000):
            left_s, left = ends_s - time.monotonic(), count - result.counts.total()
            if left_s <= 0 or left <= 0:
                return
            command = [sys.executable, "-m", "tests.fuzz.worker", result.name]
            command += ["--seed", str(seed * 1000 + number), "--seconds", str(left_s)]
            command += ["--count", str(left), "--current", str(current)]
            command += ["--corpus", str(folder / "corpus" / result.name)]
            with (Path(scratch) / "stderr").open("w+") as stderr:
                status = _follow(command, result, stderr)
                if status:
                    stderr.seek(0)
                    _note_end(result, status, current, stderr.read())


def _follow(command: list[str], result: CampaignResult, stderr: Any) -> int:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            told = json.loads(line)
            if "counts" in told:
                result.counts.update(told["counts"])
            else:
                result.findings.setdefault(told["finding"], bytes.fromhex(told["case"]))
                result.traces.setdefault(told["finding"], told["trace"])
    return worker.returncode


def _note_end(result: CampaignResult, status: int, current: Path, stderr: str) -> None:
    """A worker that ended otherwise than it should was ended by its last case."""
    if not current.exists():
        raise RuntimeError(f"the worker of {result.name} did not start:\n{stderr[-2000:]}")
    result.counts["ENDED"] += 1
    last = [line.strip() for line in stderr.splitlines() if "/offramp/" in line]
    what = f"the process ended with {status}{' at ' if last else ''}{last[0] if last else ''}"
    result.findings.setdefault(what, current.read_bytes())
    result.traces.setdefault(what, stderr[-800:])


def _run_bundles(result: CampaignResult, *, seed: int, seconds: float, count: int) -> None:
    from tests.fuzz.bundle_campaign import campaign

    ends_s = time.monotonic() + seconds
    with contextlib.closing(campaign(count, seed)) as tried:
        for mutation in tried:
            result.counts[f"{mutation.kind} {mutation.outcome.partition(':')[0]}"] += 1
            if mutation.wrong:
                told = f"seed {seed}, mutation {mutation.number}: {mutation.told}"
                result.findings.setdefault(mutation.outcome[:200], told.encode())
            if time.monotonic() > ends_s:
                return


def _run_server(result: CampaignResult, *, seed: int, seconds: float, count: int) -> None:
    from tests.fuzz.subject import Subject
    from tests.fuzz.wire import Wire

    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        folder = Path(scratch)
        wire = Wire(Subject.write(folder), folder, Random(seed))
        asyncio.run(wire.run(seconds=seconds, count=count))
    result.counts, result.findings = wire.counts, wire.findings
    times = sorted(beat.took_s * 1e3 for beat in wire.beats if beat.status == "OK")
    if times:
        result.remarks.append(
            f"ServerLive: {len(times):,} calls, median {times[len(times) // 2]:.1f} ms, "
            f"largest {times[-1]:.0f} ms; memory {wire.grown_mib:+.0f} MiB"
        )
