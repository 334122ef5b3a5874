"""Updates the figures of README and docs: measures, and writes tables between markers.

    python -m offramp.tools.figures [--measure [RESULT ...]] [--busy]

Tables are made from ``benchmarks/results/*.json`` (``tools/tables``) and written between
``<!-- table: NAME -->`` and ``<!-- end -->``. With ``--measure`` the results (all, or the named
ones) are measured first, by the command that each file records. Only one process measures at a
time. It does not start on a busy machine unless ``--busy`` is given; the load is recorded in the
results.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from offramp.engine.learning.compilation import IdleShare
from offramp.tools.tables import clusters, measured, memory, models, serving, text
from offramp.tools.tables.rows import Result, Table

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks/results"
_TABLE: Final = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_IDLE: Final = 0.3
"""A machine counts as idle if at most this number of cores is busy."""
_WATCHED_S: Final = 6.0
"""Seconds in which busy cores are counted before a measurement: enough for :class:`IdleShare` on
one core. The load average would include the measurement of the minute before."""
_FASHION: Final = "examples/fashion/calibration.npz"
_JOINT: Final = "demo/normaliser/joint"
_TEXT: Final = (
    f"eecompile generation {_JOINT} --train none --data {_JOINT}/calibration.npz --output"
)
PREPARED: Final[Mapping[str, str]] = {
    "demo/fashion.ee": "eecompile examples/fashion/fashion_resnet56.onnx "
    f"--data {_FASHION} --output demo/fashion.ee",
    "demo/fashion_auto.ee": "eecompile examples/fashion/fashion_resnet56.onnx "
    f"--data {_FASHION} --precision auto --output demo/fashion_auto.ee",
    "demo/fast.onnx": f"eecompile export demo/fashion.ee --data {_FASHION} --output demo/fast.onnx",
    "demo/minilm": "python -m offramp.tools.zoo.minilm_sentiment --output demo/minilm",
    "demo/minilm.ee": "eecompile demo/minilm/minilm_sentiment.onnx "
    "--data demo/minilm/calibration.npz --output demo/minilm.ee",
    "demo/minilm_auto.ee": "eecompile demo/minilm/minilm_sentiment.onnx "
    "--data demo/minilm/calibration.npz --precision auto --output demo/minilm_auto.ee",
    "demo/resnet18": "python -m offramp.tools.zoo.fashion_resnet --widths 32 64 128 256 --depth 2 "
    "--epochs 6 --output demo/resnet18",
    "demo/resnet18.ee": "eecompile demo/resnet18/fashion_resnet18.onnx "
    "--data demo/resnet18/calibration.npz --output demo/resnet18.ee",
    "demo/resnet18_auto.ee": "eecompile demo/resnet18/fashion_resnet18.onnx "
    "--data demo/resnet18/calibration.npz --precision auto --output demo/resnet18_auto.ee",
    "demo/small": "python -m offramp.tools.zoo.small_models --output demo/small",
    "demo/vit.ee": "eecompile demo/small/vit/vit.onnx --data demo/small/vit/calibration.npz "
    "--output demo/vit.ee",
    "demo/elastic.ee": "eecompile supernet examples/elastic/elastic_resnet.onnx "
    f"--elastic examples/elastic/spec.toml --data {_FASHION} --output demo/elastic.ee",
    _JOINT: "python -m offramp.tools.zoo.text_normaliser "
    "--output demo/normaliser --only joint layers_3 layers_4",
    "demo/whole.ee": f"{_TEXT} demo/whole.ee",
    "demo/edit.ee": f"{_TEXT} demo/edit.ee --dissimilarity edit-distance",
    "demo/tokens.ee": f"{_TEXT} demo/tokens.ee --promise tokens",
}
"""Commands that make the files that measurements read, by the path of the file or its folder."""


class MachineBusyError(Exception):
    """Other processes use the machine, so that times would be wrong."""


def read_result(name: str) -> Result:
    """Return the result ``benchmarks/results/NAME.json``; ``environment`` describes its run."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return content if isinstance(content, dict) else {"rows": content}


TABLES: Final[Mapping[str, Table]] = {
    **models.TABLES, **memory.TABLES, **serving.TABLES, **clusters.TABLES, **text.TABLES,
    "measured": measured.table(sorted(path.stem for path in RESULTS.glob("*.json"))),
}  # fmt: skip
"""Tables by the names in their markers."""


def filled(page: str) -> str:
    """Return a page with its tables made again; KeyError if a table has an unknown name."""

    def table(match: re.Match[str]) -> str:
        made = TABLES[match["name"]]
        heading, *rows = made.rows(*map(read_result, made.results))
        lines = [heading, ["---"] * len(heading), *rows]
        written = "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---")
        return f"{match[1]}{written.replace('|--- |', '|---|')}{match[3]}"

    return _TABLE.sub(table, page)


def pages() -> list[Path]:
    """Return README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_of(name: str) -> list[str]:
    """Return the command that a result records, for this interpreter; ValueError if not just one.

    Results of several runs, and results from before commands were recorded, have to be measured by
    hand once; each run records its command.
    """
    environment = read_result(name).get("environment", {})
    recorded = environment.get("command") if isinstance(environment, Mapping) else None
    if not recorded:
        raise ValueError(
            f"{name}.json does not record one command that measured it; run that measurement once "
            "by hand, which records it"
        )
    return runnable(recorded)


def runnable(command: str) -> list[str]:
    """Return a command line that runs from the sources: with modules instead of scripts."""
    program, *words = shlex.split(command)
    commands = {"eecompile": "offramp.compiler.commands.cli", "eebench": "offramp.tools.bench.cli",
                "cli.py": "offramp.tools.bench.cli"}  # fmt: skip
    if program == "python":
        return [sys.executable, *words]
    module = commands.get(program) or f"benchmarks.{program.removesuffix('.py')}"
    return [sys.executable, "-m", module, *words]


def prepare(words: Sequence[str]) -> None:
    """Make the files of :data:`PREPARED` that a command reads and that are missing."""
    for word in words:
        named = Path(word.rpartition("=")[2])
        for path in map(str, (named, *named.parents)):
            if path in PREPARED and not (ROOT / path).exists():
                command = runnable(PREPARED[path])
                prepare([read for read in command if read != path])
                print(PREPARED[path], flush=True)
                try:
                    subprocess.run(command, cwd=ROOT, check=True)
                except BaseException:  # a part of it would look as if it were complete
                    shutil.rmtree(ROOT / path, ignore_errors=True)
                    (ROOT / path).unlink(missing_ok=True)
                    raise


def busy_cores() -> float:
    """Return the mean number of busy cores over some seconds; all of them if it is unknown."""
    idle = IdleShare()
    time.sleep(_WATCHED_S)
    idle.update()
    return (1 - (idle.share or 0.0)) * (os.cpu_count() or 1)


def measure(names: Sequence[str], *, busy: bool) -> dict[str, str]:
    """Run the commands of results, one after another; return why some were not measured, by name.

    If the machine is busy, the remaining results are not measured.
    """
    failed: dict[str, str] = {}
    for number, name in enumerate(names):
        try:
            _measure(name, busy=busy)
        except MachineBusyError as error:
            return failed | dict.fromkeys(names[number:], str(error))
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            failed[name] = str(error)
    return failed


def _measure(name: str, *, busy: bool) -> None:
    """Measure a result, and make the files that it reads."""
    command = command_of(name)
    prepare(command)
    cores = busy_cores()
    if cores > _IDLE and not busy:
        raise MachineBusyError(
            f"the machine is busy: other processes used {cores:.2f} cores during the last "
            f"{_WATCHED_S:g} s, expected at most {_IDLE}. End them, or measure anyway with "
            "--busy"
        )
    print(shlex.join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


@contextmanager
def measuring_alone() -> Iterator[None]:
    """Hold the lock of measurements; SystemExit if another process has it."""
    path = ROOT / "build/measuring.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(f"another process measures here; it holds {path}") from error
        yield


def main() -> None:
    """Measure if asked to, and fill the tables."""
    parser = argparse.ArgumentParser(description="Measure figures, and fill the tables.")
    parser.add_argument("--measure", nargs="*", metavar="RESULT",
                        help="names of the results to measure first; without a name, all "
                        "results")  # fmt: skip
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine, too")
    options = parser.parse_args()
    failed: Mapping[str, str] = {}
    if options.measure is not None:
        every = sorted(path.stem for path in RESULTS.glob("*.json"))
        with measuring_alone():
            failed = measure(options.measure or every, busy=options.busy)
    for page in pages():
        old = page.read_text()
        if (new := filled(old)) != old:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")
    if failed:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        raise SystemExit(f"these results are still the old ones:{reasons}")


if __name__ == "__main__":
    main()
