"""``python -m tests.chaos --minutes 10``: 0 if nothing was wrong and nothing lost."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import ChaosOptions, run
from tests.small import compile_small

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "demo" / "fashion.ee"
EXAMPLE_INPUTS = ROOT / "examples" / "fashion" / "test.npz"


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the measured capacity")
    parser.add_argument("--most-rps", type=float, default=400.0, help="limit of the rate")
    parser.add_argument(
        "--bundle",
        type=Path,
        default=EXAMPLE if EXAMPLE.is_dir() else None,
        help="default: the example if `make bench` compiled it, else a small one",
    )
    parser.add_argument("--inputs", type=Path, help="archive of the model's inputs")
    parser.add_argument("--live-limit-ms", type=float, help="longest that ServerLive may take")
    parser.add_argument("--report", type=Path, help="write the account as JSON")
    parser.add_argument("--keep", type=Path, help="folder for the server's log")
    parser.add_argument("arguments", nargs="*", help="after --: more arguments of eeserve")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offramp-chaos-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bundle, inputs = given.bundle, given.inputs
        if bundle is None and EXAMPLE.is_dir():
            bundle = EXAMPLE
        if bundle is None:
            bundle, inputs = compile_small(Path(temporary) / "small")
        elif inputs is None and bundle.name == EXAMPLE.name:
            inputs = EXAMPLE_INPUTS
        report = asyncio.run(
            run(
                ChaosOptions(
                    minutes=given.minutes,
                    seed=given.seed,
                    bundle=bundle,
                    inputs=inputs,
                    folder=folder,
                    load=given.load,
                    most_rps=given.most_rps,
                    live_limit_ms=given.live_limit_ms,
                    arguments=tuple(given.arguments),
                )
            )
        )
    for line in report.lines():
        print(line)
    if given.report is not None:
        given.report.write_text(json.dumps(report.plain(), indent=1) + "\n")
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
