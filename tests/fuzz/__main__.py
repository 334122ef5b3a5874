"""``python -m tests.fuzz --minutes 30``: 0 if no bytes brought about what none may.

Cases that did are kept under ``.fuzz/findings``; those worth keeping for good belong in
``tests/fuzz/regressions``, named by their campaign. Cases of new outcomes are kept under
``.fuzz/corpus``, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.runner import NAMES, run

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of all campaigns together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--campaign", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--count", type=int, default=10**9, help="most cases of each campaign")
    parser.add_argument("--corpus", type=Path, default=ROOT / ".fuzz", help="folder of cases")
    given = parser.parse_args()
    names = given.campaign or list(NAMES)
    findings = 0
    for name in names:
        outcome = run(
            name,
            seed=given.seed,
            seconds=given.minutes * 60 / len(names),
            count=given.count,
            folder=given.corpus,
        )
        for line in outcome.lines():
            print(line, flush=True)
        findings += len(outcome.findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
