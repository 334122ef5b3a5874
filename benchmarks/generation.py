"""Goodput of generated text: exits, batches without refill, and decoders of fewer layers.

    python -m benchmarks.generation MODEL --bundle texts=text.ee --bundle whole=whole.ee
        [--smaller layers_3=FOLDER] [--truncate 2,3,4,5,6] [--in-flight 1,4,8,16,32]
        [--rounds 5] [--prompts 256] [--splits 100] [--json FILE]

All systems run in this process with the server's own scheduler, step loop and backend, with equal
caches and batches; no thread, no client. A fixed number of sequences is always in flight: the next
prompt starts when an answer ends. Rounds are interleaved, and figures are medians of the rounds:

* unmodified: the model in one stage, without exits;
* for each ``--bundle``: exits with batches that are refilled (E3), and the same in CALM's own
  batches, which start and end together;
* first k layers: the model cut off after k layers, without the rest;
* for each ``--smaller``: another model, for instance one trained with fewer layers.

Bundles must be of MODEL. Goodput counts the tokens of answers, and other systems have other answers
than the unmodified model: so their risks on all test prompts are shown too, and the share of right
answers if there are labels: a model with other training may differ and be as good. Shares of layers
are of the unmodified decoder's.

``--splits`` tests the promise: prompts are repeatedly divided at random into some that certify a
level of thresholds and others that test it (:mod:`.generation_splits`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from benchmarks.generation_runs import (
    LoopRun,
    Prompts,
    StepTimes,
    TextSetup,
    TextSystem,
    bundle_systems,
    layers_system,
    run_loop,
    timed_graphs,
    whole_system,
)
from benchmarks.generation_splits import SplitCounts, split_counts

from offramp.generation.serving.text_differences import compare_texts
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)

UNMODIFIED = "unmodified"
WARM_UP = 8
"""Prompts that each system answers before it is measured."""


def main() -> int:
    """Measure, print and write."""
    options = parse()
    check_outputs(options.json)
    setup = TextSetup.of(options.model, options.data, options.pool, threads=options.threads)
    systems = all_systems(setup, options)
    console = wide_console(120)
    risks = observed_risks(systems, setup, options.batch)
    console.print(risk_table(risks, len(setup.prompts)))
    rounds = measure(systems, setup, options)
    figures = summarise(rounds)
    for in_flight in options.in_flight:
        console.print(goodput_table(figures, in_flight, options))
    steps = break_down(setup, options)
    console.print(step_table(steps))
    report: dict[str, Any] = {"risks": risks, "goodput": figures, "steps": steps}
    if options.splits:
        counts = split(systems, setup, options)
        console.print(split_table(counts, options.bound))
        report["splits"] = {name: asdict(each) for name, each in counts.items()}
    report["environment"] = describe_environment(
        threads=options.threads,
        batch=options.batch,
        rounds=options.rounds,
        prompts=options.prompts,
        test_prompts=len(setup.prompts),
        most_tokens=setup.most_tokens,
        seed=options.seed,
        cache_bytes={s.name: s.backend.statistics()["cache_bytes"] for s in systems},
    )
    write_json(options.json, report)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, help="the unmodified model: a decoder's file, or a folder of three")
    add("--data", type=Path, help="npz of test prompts (default: test.npz next to it)")
    add("--bundle", type=named, action="append", default=[], metavar="NAME=FOLDER",
        help="generating bundle of the model; may be repeated")  # fmt: skip
    add("--smaller", type=named, action="append", default=[], metavar="NAME=MODEL",
        help="another model, as it is; may be repeated")  # fmt: skip
    add(
        "--truncate",
        type=numbers,
        default=(2, 3, 4, 5, 6),
        help="numbers of first layers that are kept",
    )
    add(
        "--in-flight",
        type=numbers,
        default=(1, 4, 8, 16, 32),
        help="numbers of sequences in flight",
    )
    add("--batch", type=int, default=16, help="largest number of rows of a step")
    add("--rounds", type=int, default=5, help="number of rounds for each system")
    add("--prompts", type=int, default=256, help="number of prompts in a round")
    add("--threads", type=int, default=1, help="number of threads of ONNX Runtime")
    add(
        "--splits",
        type=int,
        default=0,
        help="number of random splits that certify and test; 0 for none",
    )
    add("--pool", type=Path, help="npz of prompts for --splits (default: the test prompts)")
    add("--bound", type=float, default=0.01, help="bound of the promises that --splits tests")
    add("--seed", type=int, default=0, help="seed of the random splits")
    return parser.parse_args(argv)


def named(text: str) -> tuple[str, Path]:
    """Read ``NAME=PATH``."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PATH")
    return name, Path(path)


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers, separated by commas; none if the text is empty."""
    return tuple(int(number) for number in text.split(",") if number)


def all_systems(setup: TextSetup, options: argparse.Namespace) -> list[TextSystem]:
    """Load all systems, the unmodified model first; slots are for the most sequences in flight."""
    slots = max(*options.in_flight, options.batch)
    systems = [whole_system(UNMODIFIED, setup, setup.model, slots)]
    for name, path in options.bundle:
        systems += bundle_systems(name, setup, path, slots)
    systems += [layers_system(setup, count, slots) for count in options.truncate]
    systems += [whole_system(name, setup, path, slots) for name, path in options.smaller]
    return systems


def observed_risks(
    systems: Sequence[TextSystem], setup: TextSetup, batch: int
) -> dict[str, dict[str, float]]:
    """Compare the answers to all test prompts with the unmodified model's."""
    found: dict[str, dict[str, float]] = {}
    full: list[list[int]] = []
    for system in systems:
        run = run_loop(system, setup, setup.prompts, in_flight=batch, batch=batch)
        full = full or run.texts
        compared = [compare_texts(*pair) for pair in zip(run.texts, full, strict=True)]
        differing = sum(difference.differs for difference in compared)
        found[system.name] = {
            "tokens": differing / sum(difference.compared for difference in compared),
            "whole_outputs": differing / len(compared),
            "edit_distance": float(np.mean([difference.edits for difference in compared])),
            "layers_run": run.layers_run / setup.layers,
            "tokens_of_answer": run.tokens / len(compared),
        }
        if setup.labels:
            right = [text == label for text, label in zip(run.texts, setup.labels, strict=True)]
            found[system.name]["right"] = float(np.mean(right))
    return found


def measure(
    systems: Sequence[TextSystem], setup: TextSetup, options: argparse.Namespace
) -> dict[int, dict[str, list[LoopRun]]]:
    """Run all rounds, by sequences in flight and system; each round begins with another system."""
    prompts = setup.prompts[: options.prompts]
    found: dict[int, dict[str, list[LoopRun]]] = {}
    for in_flight in options.in_flight:
        runs = found[in_flight] = {system.name: list[LoopRun]() for system in systems}
        for system in systems:
            run_loop(system, setup, prompts[:WARM_UP], in_flight=in_flight, batch=options.batch)
        for number in range(options.rounds):
            turn = number % len(systems)
            for system in [*systems[turn:], *systems[:turn]]:
                run = run_loop(system, setup, prompts, in_flight=in_flight, batch=options.batch)
                runs[system.name].append(run)
    return found


def summarise(rounds: dict[int, dict[str, list[LoopRun]]]) -> list[dict[str, Any]]:
    """Return medians over rounds; ratios are of the same round of the unmodified model."""
    found = []
    for in_flight, runs in rounds.items():
        base = [run.tokens_per_s for run in runs[UNMODIFIED]]
        for name, of_system in runs.items():
            rates = [run.tokens_per_s for run in of_system]
            ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
            found.append(
                {
                    "in_flight": in_flight,
                    "system": name,
                    "tokens_per_s": float(np.median(rates)),
                    "ratio": float(np.median(ratios)),
                    "ratios": ratios,
                    "token_ms": float(np.median([run.token_ms for run in of_system])),
                    "rows_of_a_step": float(np.median([run.rows_of_a_step for run in of_system])),
                }
            )
    return found


def break_down(setup: TextSetup, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return where the time of a step goes, for the unmodified model and each bundle.

    These runs are timed call by call, which takes time of its own: compare shares, not totals.
    """
    prompts: Prompts = setup.prompts[: options.prompts]
    slots = max(*options.in_flight, options.batch)
    found = []
    with timed_graphs() as times:
        systems = [whole_system(UNMODIFIED, setup, setup.model, slots)]
        systems += [bundle_systems(name, setup, path, slots)[0] for name, path in options.bundle]
        for system in systems:
            for in_flight in options.in_flight:
                times.seconds.clear()
                run = run_loop(system, setup, prompts, in_flight=in_flight, batch=options.batch)
                facts = {"system": system.name, "in_flight": in_flight}
                step_ms = 1e3 * run.seconds / run.steps
                found.append({**facts, "step_ms": step_ms, **times.shares(run.seconds)})
    return found


def split(
    systems: Sequence[TextSystem], setup: TextSetup, options: argparse.Namespace
) -> dict[str, SplitCounts]:
    """Count splits for the exits of the first bundle."""
    system = next((system for system in systems if system.has_exits), None)
    if system is None:
        raise SystemExit("--splits needs a --bundle with exits: its exits answer at all levels")
    return split_counts(
        systems[0],
        system,
        setup,
        batch=options.batch,
        bound=options.bound,
        splits=options.splits,
        seed=options.seed,
    )


def risk_table(risks: dict[str, dict[str, float]], prompts: int) -> Any:
    """Draw the observed risks."""
    table = figure_table(
        "Against the unmodified model's answers",
        f"Shares on {prompts} test prompts: tokens that differ at the same prefix, whole answers "
        "that differ, edit distance by the longer answer; decoder layers that a token ran; whole "
        "answers that are the labels.",
        (
            "system",
            "tokens",
            "whole answers",
            "edit distance",
            "layers",
            "tokens of an answer",
            "right",
        ),
        names=("system",),
    )
    for name, risk in risks.items():
        shares = [f"{risk[key]:.2%}" for key in ("tokens", "whole_outputs", "edit_distance")]
        right = f"{risk['right']:.1%}" if "right" in risk else "–"
        length = f"{risk['tokens_of_answer']:.1f}"
        table.add_row(name, *shares, f"{risk['layers_run']:.1%}", length, right)
    return table


def goodput_table(
    figures: Sequence[dict[str, Any]], in_flight: int, options: argparse.Namespace
) -> Any:
    """Draw the goodput with so many sequences in flight."""
    table = figure_table(
        f"{in_flight} sequences in flight",
        f"Medians of {options.rounds} rounds of {options.prompts} prompts; at most "
        f"{options.batch} rows a step; ratios within a round.",
        ("system", "tokens/s", "ratio", "from", "to", "ms a token", "rows a step"),
        names=("system",),
    )
    for figure in figures:
        if figure["in_flight"] == in_flight:
            table.add_row(
                figure["system"],
                f"{figure['tokens_per_s']:,.0f}",
                *(f"×{x:.2f}" for x in (figure["ratio"], min(figure["ratios"]))),
                f"×{max(figure['ratios']):.2f}",
                f"{figure['token_ms']:.2f}",
                f"{figure['rows_of_a_step']:.1f}",
            )
    return table


def step_table(steps: Sequence[dict[str, Any]]) -> Any:
    """Draw the shares of a step's time."""
    table = figure_table(
        "Where the time of a step goes",
        "Shares of the wall time. caches: copies to and from slots; python: all that is none of "
        "the others.",
        ("system", "in flight", "ms a step", *StepTimes.KINDS, "python"),
        names=("system",),
    )
    for step in steps:
        shares = [f"{step[kind]:.1%}" for kind in (*StepTimes.KINDS, "python")]
        table.add_row(step["system"], str(step["in_flight"]), f"{step['step_ms']:.2f}", *shares)
    return table


def split_table(counts: dict[str, SplitCounts], bound: float) -> Any:
    """Draw how often promises were broken."""
    table = figure_table(
        "Splits that certify and test",
        f"Half of the prompts certify a level at {bound:.2%} and 95 %, the others test it; at "
        "most 5 % of splits may be above the bound.",
        ("promise", "splits", "certified", "above on test", "above on all", "share above"),
        names=("promise",),
    )
    for name, count in counts.items():
        shown = (count.splits, count.certified, count.above_on_test, count.above_in_pool)
        table.add_row(name, *map(str, shown), f"{count.failing:.1%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
