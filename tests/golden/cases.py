"""Recorded outputs of public commands, and of benchmarks on virtual time, on a recorded bundle.

    python -m tests.golden.cases record          write this checkout's outputs to recorded/
    python -m tests.golden.cases write FOLDER    write them in full to a folder, to compare

Commands are run in this process and found by their names in ``pyproject.toml``. Omitted are the
names of the machine, version and time, measured values, and prose.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
import tomllib
import unittest.mock
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.golden.served import SERVED_MODES, served

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
BUNDLE, FRESH = FOLDER / "bundle", FOLDER / "fresh.npz"
RECORDED = FOLDER / "recorded"
VOLATILE = {
    "environment": "names machine, versions and time",
    "tuning_ms": "measured",
    "description": "prose",
    "text": "prose",
}
DIGITS = 9
"""Digits that do not depend on the machine: its C library may round logarithms differently."""

SCHEDULERS = (
    "run-through,refill,rebatch,slackfit,slackfit-bare,max-accuracy,max-batch,cheapest,clockwork,"
    "delay,fixed:1,fixed:final,source:clockwork,source:delay,source:run-through"
)
MODES = ",".join(
    f"{mode}:{name}"
    for mode in ("audit", "release")
    for name in ("run-through", "refill", "rebatch", "slackfit", "clockwork", "delay")
)
RATES = "t_s,rate_rps\n0,200\n0.2,1500\n0.4,100\n"
SIMULATIONS = {
    # name: policies and options
    "light": f"{SCHEDULERS} --rate 200 --duration-s 0.4",
    "busy": f"{SCHEDULERS} --rate 700 --duration-s 0.4 --slo-ms 12 --max-queue-delay-ms 1",
    "two-streams": f"{SCHEDULERS} --trace gamma --cv2 4 --rate 1100 --duration-s 0.25 --slo-ms 20 "
    "--workers 2 --seed 1",
    "overload": f"{SCHEDULERS} --rate 4000 --duration-s 0.08 --slo-ms 15 --max-queue-samples 48 "
    "--max-batch-size 16",
    "overload-two-streams": f"{SCHEDULERS} --trace constant --rate 5000 --duration-s 0.06 "
    "--slo-ms 10 --workers 2 --max-batch-size 8",
    "modes": f"{MODES} --rate 600 --duration-s 0.3 --slo-ms 30 --audit-probability 0.2",
    "modes-two-streams": f"{MODES} --rate 1500 --duration-s 0.15 --workers 2 "
    "--audit-probability 0.2 --seed 2",
    "mistaken": "run-through,refill,rebatch,slackfit,clockwork --rate 500 --duration-s 0.4 "
    "--slo-ms 15 --slowdown 1.6",
    "unforced": "run-through,refill,slackfit,clockwork --rate 900 --duration-s 0.3 --slo-ms 8 "
    "--forbid-forced-exits",
    "parallel": "run-through,refill,rebatch --rate 2600 --duration-s 0.12 --workers 2 "
    "--parallel-below 12",
    "violations": "run-through,refill,rebatch --rate 2600 --duration-s 0.12 --workers 2 "
    "--max-violations 0.05",
    "bursty": "run-through,refill,slackfit --trace bursty --base-rate 300 --rate 600 --cv2 8 "
    "--duration-s 0.4 --slo-ms 20",
    "accelerate": "run-through,refill,slackfit --trace accelerate --rate 200 --rate-to 1200 "
    "--acceleration 2000 --cv2 2 --duration-s 0.6 --slo-ms 20",
    "rate-file": "run-through,slackfit --trace rate:rates.csv --rate 600 --duration-s 0.6 "
    "--slo-ms 9",
}
ADAPTATIONS = {
    "classes": "--scenario classes --samples 700 --tuning-delay 200",
    "difficulty": "--scenario difficulty --samples 500 --tuning-delay 100 --feedback-delay 0 "
    "--max-disagreement 0.03 --batch-size 16 --seed 1",
}
REHEARSALS = {
    "adapt": "--max-disagreement 0.013",
    "anew": "--max-disagreement 0.02 --rehearsal-batch 16 --max-violations 0.05 --from-scratch",
}
TABLES = ("timeline", "percentiles", "windows", "settled")
LONG = 20
"""Entries of a list above which it is digested."""
Recording = Callable[[], Any]


def command(name: str) -> Callable[[], int]:
    """Find a public command by its name in ``pyproject.toml``."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[name].partition(":")
    found: Callable[[], int] = getattr(import_module(module), function)
    return found


def run(name: str, *arguments: str) -> None:
    """Run a public command, quietly."""
    words, errors = io.StringIO(), io.StringIO()
    line = [name, *map(str, arguments)]
    with (
        contextlib.redirect_stdout(words),
        contextlib.redirect_stderr(errors),
        unittest.mock.patch.object(sys, "argv", line),
    ):
        status = command(name)()
    assert status == 0, f"{name} {' '.join(arguments)} ended with {status}: {errors.getvalue()}"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is the current one for a while."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def simulated(options: str) -> Any:
    """Return the output of ``eebench simulate``."""
    policies, _, rest = options.partition(" ")
    with scratch() as folder:
        (folder / "rates.csv").write_text(RATES)
        arguments = ["--policy", policies, *rest.split(), "--json", "found.json"]
        run("eebench", "simulate", str(BUNDLE), *arguments)
        return json.loads((folder / "found.json").read_text())


def run_adapt(*arguments: str) -> None:
    """Run ``python -m benchmarks.adapt``, which was ``eebench adapt`` in older checkouts."""
    try:
        module = import_module("benchmarks.adapt.__main__")
    except ModuleNotFoundError:
        run("eebench", "adapt", *arguments)
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert module.main(arguments) == 0, arguments


def adapted(options: str) -> Any:
    """Return the output of ``python -m benchmarks.adapt``."""
    with scratch() as folder:
        arguments = ["--data", str(FRESH), *options.split(), "--json", "found.json"]
        run_adapt(str(BUNDLE), *arguments)
        return json.loads((folder / "found.json").read_text())


def rehearsed(options: str) -> Any:
    """Return the result of ``eecompile rehearse`` for the bundle."""
    with scratch() as folder:
        arguments = ["--data", str(FRESH), *options.split(), "--output", "new.ee"]
        run("eecompile", "rehearse", str(BUNDLE), *arguments)
        names = ("policy.json", "rehearsal.json")
        return {name: json.loads((folder / "new.ee" / name).read_text()) for name in names}


def cases() -> dict[str, Recording]:
    """Every recording, by name."""
    found: dict[str, Recording] = {}
    for name, options in SIMULATIONS.items():
        found[f"simulate-{name}"] = lambda o=options: simulated(o)
    for mode in SERVED_MODES:
        found[f"served-{mode}"] = lambda m=mode: served(m, BUNDLE)
    for name, options in ADAPTATIONS.items():
        found[f"adapt-{name}"] = lambda o=options: adapted(o)
    for name, options in REHEARSALS.items():
        found[f"rehearse-{name}"] = lambda o=options: rehearsed(o)
    return found | {
        "selection": _selections,
        "threshold-search": _searches,
        "adjustment": _adjustments,
        "e3": _e3,
        "superserve": _superserve,
    }


def _selections() -> Any:
    from tests.golden.entry_points import selected

    return {
        f"{bound:g} {overhead} {size}": selected(
            BUNDLE, max_disagreement=bound, max_overhead=overhead, batch_size=size
        )
        for bound in (0.01, 0.03)
        for overhead in (None, 0.02)
        for size in (1, 8, 32)
    }


def _searches() -> Any:
    from tests.golden.entry_points import searched

    return {
        f"{method} {bound:g} {samples}": searched(
            BUNDLE, max_disagreement=bound, method=method, samples=samples
        )
        for method in ("search", "greedy", "path")
        for bound in (0.01, 0.03)
        for samples in (256, 1500)
    }


def _adjustments() -> Any:
    from tests.golden.entry_points import adjusted

    return adjusted(samples=128, count=4)


def _e3() -> Any:
    from tests.golden.entry_points import shrinking

    return {
        f"{system} {easy:g} {size} {rate:g}": shrinking(system, easy=easy, size=size, rate=rate)
        for system in ("source", "run-through", "refill", "rebatch")
        for easy, size, rate in ((0.8, 8, 1500.0), (0.5, 4, 900.0), (0.5, 1, 3600.0))
    }


def _superserve() -> Any:
    from tests.golden.entry_points import bursts, sustained

    policies = (
        "slackfit",
        "slackfit-bare",
        "max-batch",
        "max-accuracy",
        "cheapest",
        "fixed:final@3",
    )
    return {
        "sustained 5000": sustained(5000.0),
        **{
            f"{policy} cv2={cv2}": bursts(policy, cv2=cv2, duration_s=0.05)
            for policy in policies
            for cv2 in (2, 8)
        },
    }


def steady(value: Any) -> Any:
    """A document without what is volatile."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VOLATILE}
    return [steady(item) for item in value] if isinstance(value, list | tuple) else value


def rounded(value: Any) -> Any:
    """A document with no more digits than machines agree on."""
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def digested(value: Any) -> Any:
    """A document with its tables as digests, so that what a person reads is left."""
    if isinstance(value, dict):
        return {k: _sha256(v) if k in TABLES else digested(v) for k, v in value.items()}
    if isinstance(value, list) and len(value) > LONG:
        return {"length": len(value), "sha256": _sha256(value)}
    return [digested(item) for item in value] if isinstance(value, list) else value


def readable(document: Any) -> Any:
    """Return the committed form of a recording."""
    return digested(rounded(steady(document)))


def dump(document: Any) -> str:
    """JSON with one short line a list of numbers."""
    return f"{json.dumps(document, indent=1, ensure_ascii=False)}\n"


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def main() -> None:
    """Record, or write what is compared.

    Raises:
        RuntimeError: Another checkout's code would run.
    """
    import offramp

    if not Path(offramp.__file__).is_relative_to(ROOT):
        raise RuntimeError(
            f"offramp is that of {offramp.__file__}, not of {ROOT}; set PYTHONPATH to "
            f"{ROOT / 'src'}:{ROOT}"
        )
    if sys.argv[1] == "record":
        folder, form = RECORDED, readable
    else:
        folder, form = Path(sys.argv[2]).resolve(), steady
    folder.mkdir(parents=True, exist_ok=True)
    for name, recording in cases().items():
        (folder / f"{name}.json").write_text(dump(form(recording())))


if __name__ == "__main__":
    main()
