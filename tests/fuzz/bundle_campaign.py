"""A campaign against bundles: ``python -m tests.fuzz.bundle_campaign --count 10000``.

Each mutation is opened, read, and where it opens, served. Allowed are a ``BundleError`` or
``EngineError`` of one line, and answers that are those of the exits that they name. A worker does
it in a process of its own, as hostile graphs may end ONNX Runtime; that, a hang, a traceback in
the log and a wrong answer are findings.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import faulthandler
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.bundle import Bundle, BundleError
from offramp.certify import MODEL_END, NEVER
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import EngineError
from offramp.engine.common.timing import Effort
from offramp.engine.core import Engine
from offramp.engine.models import profile_check
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, plan_stages
from tests.bundles import sharing_weights
from tests.engines import ActiveExit, engine_bundle
from tests.fuzz.bundles import Mutation, mutations
from tests.sliced import inputs_of, sliced

ROWS = 4
LONGEST_S = 120
"""A mutation that takes longer hangs; on a busy machine one takes a second at most."""
_MEMORY_BYTES = 16 * 2**30
_REPORTED = 100
"""Mutations from one word of progress to the next."""
_MODES = (Mode.AUDIT, Mode.RELEASE, Mode.LEAVE, Mode.OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of a mutation."""

    number: int
    kind: str
    told: str
    outcome: str
    """``refused``, ``answered``, or what is wrong, after ``WRONG:``."""

    @property
    def wrong(self) -> bool:
        """Return True if the outcome is not an allowed one."""
        return self.outcome.startswith("WRONG")


def campaign(count: int, seed: int) -> Iterator[Finding]:
    """Try mutations in a worker, and in another one after each that a mutation has ended."""
    start = 0
    while start < count:
        command = [sys.executable, "-m", "tests.fuzz.bundle_campaign", "--worker"]
        arguments = ["--count", str(count), "--seed", str(seed), "--start", str(start)]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            begun: dict[str, Any] = {}
            for line in worker.stdout:
                said = json.loads(line)
                if "outcome" in said:
                    yield Finding(**said)
                    start = said["number"] + 1
                else:
                    begun = said
        if worker.returncode:
            if begun.get("number") != start:
                raise RuntimeError(f"the worker ended with {worker.returncode} between mutations")
            yield Finding(**begun, outcome=f"WRONG: the process ended with {worker.returncode}")
            start += 1


class _Subject:
    """A small bundle, and the right answers of each of its exits to a few samples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        active = (ActiveExit(exit=0, threshold=0.4), ActiveExit(exit=1, threshold=0.5))
        held = engine_bundle("mlp", folder / "held.ee", active=active)
        self.bundle = sharing_weights(held, folder / "m.ee")
        self.inputs = inputs_of(sliced("mlp"), ROWS)
        self.log = _TracebackLog()
        logging.getLogger().addHandler(self.log)
        logging.getLogger().setLevel(logging.INFO)

    @cached_property
    def answers(self) -> dict[int, np.ndarray[Any, Any]]:
        """[rows, classes] by exit."""
        exits = [ActiveExit(exit=e.index, threshold=NEVER) for e in self.bundle.manifest.exits]
        stages = plan_stages(self.bundle.manifest, self.bundle.read, exits)
        pipeline = Pipeline(
            OnnxRuntimeBackend(), Plan(stages=stages, policy_version=0, mode=Mode.LEAVE)
        )
        slot = pipeline.backend.open_slot()
        batch, found = slot.upload(self.inputs), {}
        for index, stage in enumerate(stages):
            answer, _, carry = pipeline.step(slot, index, batch).result
            assert answer is not None
            found[stage.answered_by] = answer
            batch = carry or batch
        return found

    def outcome(self, mutation: Mutation, mode: Mode) -> str:
        """Open a mutation, read it, and serve it."""
        root = self.folder / "mutated.ee"
        shutil.rmtree(root, ignore_errors=True)
        mutation.write(root)
        self.log.seen.clear()
        try:
            bundle = Bundle.open(root)
            for read in (bundle.records, bundle.profile, bundle.measured, bundle.input_ranges):
                read()
            told = asyncio.run(self._serve(root, mode, exact=mutation.kind != "onnx"))
        except (BundleError, EngineError) as error:
            told = "refused" if "\n" not in str(error) else f"WRONG: two lines: {error}"
        except BaseException as error:  # a worker tells of all
            told = f"WRONG: {type(error).__name__}: {error}"
        return f"WRONG: in the log: {self.log.seen[0]}" if self.log.seen else told

    async def _serve(self, root: Path, mode: Mode, *, exact: bool) -> str:
        options = EngineOptions(
            mode=mode,
            backend="onnxruntime",
            threads=1,
            keep_state=False,
            defaults=ModelOptions(max_batch_size=2),
        )
        async with await Engine.open({"m": root}, options) as engine:
            result = await engine.infer("m", self.inputs)
        (values,) = result.outputs.values()
        for row, exit_ in enumerate(result.exits.tolist()):
            if values.shape != self.answers[MODEL_END].shape:
                return f"WRONG: an answer of shape {values.shape}"
            right = self.answers[exit_][row]
            if exact and not np.allclose(values[row], right, rtol=1e-3, atol=1e-5):
                return f"WRONG: sample {row} is answered by {values[row]}, expected {right}"
        return "answered"


class _TracebackLog(logging.Handler):
    """Keeps what is logged with a traceback, or in more than a line."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or "\n" in text:
            error = record.exc_info[1] if record.exc_info else None
            self.seen.append(f"{text} ({error!r})")


def _work(count: int, seed: int, start: int) -> None:
    """Try mutations, and print the outcome of each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # native libraries print there too
    with told, tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile_check, "_EFFORT", Effort(least=1, most=1, seconds=0, half_width=1))
        subject = _Subject(Path(folder))
        chosen = mutations(subject.bundle.path, seed, start)
        for number, mutation in enumerate(islice(chosen, count - start), start):
            said = {"number": number, "kind": mutation.kind, "told": mutation.told}
            told.write(f"{json.dumps(said)}\n")
            faulthandler.dump_traceback_later(LONGEST_S, exit=True)
            outcome = subject.outcome(mutation, _MODES[number % len(_MODES)])
            told.write(f"{json.dumps({**said, 'outcome': outcome})}\n")
            faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Run a campaign; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.count, options.seed, options.start)
        return 0
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for finding in campaign(options.count, options.seed):
        counts[finding.kind, finding.outcome.partition(":")[0]] += 1
        if finding.wrong:
            told = f"{finding.number} {finding.kind}: {finding.told}\n    {finding.outcome}"
            print(told, flush=True)
        if counts.total() % _REPORTED == 0:
            print(f"{counts.total()} tried", flush=True)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:6} {outcome:10} {count}")
    return int(any(outcome == "WRONG" for _, outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
