"""Mutation testing: change one place of the code at a time, and see whether the nearest tests fail.

``python -m offramp.tools.mutate --count 200 --seed 1 [FOLDER ...]``, from the root of the tree.
A mutant that no test notices is a statement that nobody checks, or one that has no effect.

1. The test files nearest to the changed file are found by imports and names. Each runs once,
   unchanged, and the functions that it enters are noted (``--map FILE`` keeps that for the next
   time). Files that fail already, or are too slow, are left out.
2. Those of them that enter the mutant's function run until the first failure. A mutant that hangs
   is killed by the clock.

All of this happens in a temporary copy. Each run is forked from a process that has imported the
large third-party packages, but nothing of the tree.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from offramp.tools.mutate.changes import Mutant, choose, describe
from offramp.tools.mutate.nearness import Nearness
from offramp.tools.mutate.running import Judged, Outcome, TestFile, Workshop, preload

EXCLUDED: Final = (
    "tests/", "benchmarks/", "examples/", "docs/", "tools/gpu/", "tools/zoo/", "tools/mutate/",
)  # fmt: skip


def tree_files(root: Path) -> list[str]:
    """Files of a tree: what git does not ignore, or everything that is not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") and (root / ".git").exists():
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        names = sorted(set(filter(None, listed.stdout.split("\0"))))
        return [name for name in names if (root / name).is_symlink() or (root / name).is_file()]
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(p) for p in found if not any(q.startswith((".", "__py")) for q in p.parts))


def product_files(files: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Python files of some folders; of all packages, without tests and the like, by default."""
    chosen = [name for name in files if name.endswith(".py") and "/" in name]
    if not folders:
        return [name for name in chosen if not name.startswith(EXCLUDED)]
    wanted = tuple(f"{folder.rstrip('/')}/" for folder in folders)
    return [name for name in chosen if f"{name}/".startswith(wanted)]


def test_files(files: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Find the test files in some folders."""
    inside = tuple(f"{folder.rstrip('/')}/" for folder in folders)
    return [n for n in files if n.startswith(inside) and re.match(r"test_\w+\.py$", Path(n).name)]


class Tests:
    """The test files of a tree; each is looked at when it is first asked for."""

    def __init__(
        self, workshop: Workshop, nearness: Nearness, *, slowest_s: float, kept: Path | None
    ) -> None:
        """Take what is known from ``kept``, and keep it there."""
        self._workshop, self._nearness, self._slowest_s = workshop, nearness, slowest_s
        self._kept = kept
        entries = json.loads(kept.read_text(encoding="utf-8")) if kept and kept.exists() else ()
        tests = [TestFile(**{**entry, "entered": frozenset(entry["entered"])}) for entry in entries]
        self._known = {test.file: test for test in tests}

    def nearest(self, mutant: Mutant, most: int) -> Iterator[list[TestFile]]:
        """Yield the test files that enter a mutant's function one by one, the nearest first.

        Where none of the nearest does (a command that they start in a process of its own, say),
        the nearest all at once.
        """
        place = f"{mutant.file}::{mutant.function}"
        entering, others = 0, []
        for name in self._nearness.ranked(mutant.file)[: 2 * most]:
            test = self._look_at(name)
            if test.passed and place in test.entered:
                yield [test]
                entering += 1
            elif test.passed:
                others.append(test)
            if entering == most:
                return
        if others and not entering:
            yield others[:most]

    def _look_at(self, name: str) -> TestFile:
        if name not in self._known:
            test = self._known[name] = self._workshop.record(name, self._slowest_s)
            told = "unchanged" if test.passed else "fails unchanged or is too slow, left out"
            print(f"     {test.seconds:6.1f} s {name}: {told}", file=sys.stderr, flush=True)
            if self._kept:
                known = self._known.values()
                entries = [{**asdict(test), "entered": sorted(test.entered)} for test in known]
                self._kept.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        return self._known[name]


def report(judged: Sequence[Judged]) -> str:
    """Counts by outcome, and the survivors."""
    counts = {outcome: sum(j.outcome is outcome for j in judged) for outcome in Outcome}
    killed = counts[Outcome.KILLED] + counts[Outcome.TIMED_OUT]
    lines = [", ".join(f"{count} {outcome}" for outcome, count in counts.items())]
    lines.append(f"{killed} of {len(judged)} killed ({killed / max(len(judged), 1):.1%})")
    lines += [
        f"{j.outcome}: {describe(j.mutant)}" + (f"  [{j.by}]" if j.by else "")
        for j in sorted(judged, key=lambda j: (j.mutant.file, j.mutant.line))
        if j.outcome in (Outcome.SURVIVED, Outcome.UNTESTED)
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if fewer mutants were killed than ``--at-least``."""
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", help="to change; default: all packages")
    parser.add_argument("--root", type=Path, default=Path(), help="of the tree")
    parser.add_argument("--count", type=int, default=200, help="of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", nargs="*", default=["tests/unit"], help="folders of test files")
    parser.add_argument("--most", type=int, default=4, help="test files per mutant")
    parser.add_argument("--slowest", type=float, default=60.0, help="seconds of a test file")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds more for a mutant")
    parser.add_argument("--map", type=Path, help="where to keep what tests enter")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--at-least", type=float, default=0.0, help="share that must be killed")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args(arguments)
    files = tree_files(options.root)
    product = product_files(files, options.folders)
    mutants = choose(options.root, product, count=options.count, seed=options.seed)
    if options.list:
        print(*map(describe, mutants), sep="\n")
        return 0
    preload()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        workshop = Workshop(options.root, Path(folder) / "tree", files, grace_s=options.grace)
        nearness = Nearness(options.root, files, test_files(files, options.tests))
        tests = Tests(workshop, nearness, slowest_s=options.slowest, kept=options.map)
        judged = []
        for number, mutant in enumerate(mutants, start=1):
            judged.append(workshop.judge(mutant, tests.nearest(mutant, options.most)))
            last = judged[-1]
            took = f"{number:4} {last.outcome:9} {last.seconds:5.1f} s"
            print(took, describe(mutant), f"[{last.by}]", flush=True)
    print(report(judged))
    if options.json:
        options.json.write_text(json.dumps([asdict(j) for j in judged], indent=1) + "\n")
    killed = sum(j.outcome in (Outcome.KILLED, Outcome.TIMED_OUT) for j in judged)
    return int(killed < options.at_least * len(judged))


if __name__ == "__main__":
    sys.exit(main())
