"""``make demo``: all steps of a user, on the shipped example, with the real commands."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from examples.commands import ROOT, console, run, serving, title

from offramp.bundle import Bundle
from offramp.client import Client

EXAMPLE = Path("examples/fashion")
BUNDLE = Path("demo/fashion.ee")
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat",
           "sandal", "shirt", "sneaker", "bag", "ankle boot")  # fmt: skip


def main() -> int:
    """Compile, serve, call, compare; return the exit status."""
    parser = argparse.ArgumentParser(description="Demonstrate Offramp on a real model.")
    parser.add_argument("--keep", action="store_true", help="serve on until interrupted")
    options = parser.parse_args()
    started_s = time.monotonic()

    title("1  Compile: slice the model, train exits, certify a policy")
    if (ROOT / BUNDLE).exists():
        console.print(f"{BUNDLE} is there already; remove it to compile again")
    else:
        model, data = EXAMPLE / "fashion_resnet56.onnx", EXAMPLE / "calibration.npz"
        run("offramp.compiler.commands.cli", "eecompile", model, "--data", data, "--output", BUNDLE)
    if not Bundle.open(ROOT / BUNDLE).policy.active:
        console.print(_why_not(), style="bold red")
        return 1

    title("2  Serve, and call it")
    with serving(BUNDLE) as (address, url):
        _call(address)
        with urllib.request.urlopen(f"{url}/metrics") as response:
            text = response.read().decode()
        answers = [line for line in text.splitlines() if line.startswith("offramp_answers_total")]
        console.print("from /metrics:", *answers, sep="\n  ")
        if options.keep:
            console.print(f"\nstatus page: {url}/   gRPC: {address}   Ctrl-C stops")
            with _until_interrupted():
                signal.pause()

    title("3  Compare with the unmodified model: measured here and now")
    test = EXAMPLE / "test.npz"
    sizes = ("--batch-sizes", "1,4,16,32", "--samples", "2000")
    run("offramp.tools.bench.cli", "eebench", "compare", BUNDLE, "--data", test, *sizes)

    title("Look at")
    console.print(f"report:       {BUNDLE / 'report.html'}")
    console.print(f"status page:  eeserve {BUNDLE}, then the HTTP port; or make demo KEEP=1")
    if shutil.which("eeserve") is None:
        activate = Path(sys.prefix, "bin", "activate")
        console.print(f"eeserve and the other commands are found after:  . {activate}")
    console.print(f"{time.monotonic() - started_s:.0f} s in all")
    return 0


def _why_not() -> str:
    return (
        f"{BUNDLE} has no active exit: it serves the unmodified model, and there is nothing to "
        "show. What kept the exits out of use was said when it was compiled, and stands at the top "
        f"of {BUNDLE / 'report.html'}. Remove {BUNDLE} to compile again."
    )


def _call(address: str) -> None:
    with np.load(ROOT / EXAMPLE / "test.npz") as test:
        images, labels = test["image"][:512], test["label"][:512]
    with Client(address) as client:
        first = client.infer("fashion", {"image": images[:8]})
        console.print("the first eight answers:")
        for row, logits in enumerate(first.outputs["logits"]):
            place = "the end" if first.exits[row] < 0 else f"exit {first.exits[row]}"
            console.print(
                f"  {CLASSES[int(logits.argmax())]:<10} (is {CLASSES[labels[row]]}) "
                f"from {place}, confidence {first.confidences[row]:.3f}"
            )
        started_s = time.perf_counter()
        for start in range(8, 512, 8):
            client.infer("fashion", {"image": images[start : start + 8]})
        elapsed_ms = (time.perf_counter() - started_s) / 63 * 1e3
        console.print(f"63 more requests of 8 images: {elapsed_ms:.1f} ms each, one after another")


@contextmanager
def _until_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopping")


if __name__ == "__main__":
    sys.exit(main())
