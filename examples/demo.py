"""``make demo``: everything that a user does, on the shipped example, with the real commands."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console

from offramp.bundle import Bundle
from offramp.client import Client

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = Path("examples/fashion")
BUNDLE = Path("demo/fashion.ee")
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat",
           "sandal", "shirt", "sneaker", "bag", "ankle boot")  # fmt: skip
READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/, serving")
START_LIMIT_S = 120.0

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Compile, serve, call, compare; gives the exit status."""
    parser = argparse.ArgumentParser(description="Show what Offramp does, on a real model.")
    parser.add_argument("--keep", action="store_true", help="serve on until interrupted")
    options = parser.parse_args()
    started_s = time.monotonic()

    _title("1  Compile: slice the model, train exits, certify a policy")
    if (ROOT / BUNDLE).exists():
        console.print(f"{BUNDLE} is there already; remove it to compile again")
    else:
        model, data = EXAMPLE / "fashion_resnet56.onnx", EXAMPLE / "calibration.npz"
        _run(
            "offramp.compiler.commands.cli", "eecompile", model, "--data", data, "--output", BUNDLE
        )
    if not Bundle.open(ROOT / BUNDLE).policy.active:
        console.print(_why_not(), style="bold red")
        return 1

    _title("2  Serve, and call it")
    with _serving() as (address, url):
        _call(address)
        with urllib.request.urlopen(f"{url}/metrics") as response:
            text = response.read().decode()
        answers = [line for line in text.splitlines() if line.startswith("offramp_answers_total")]
        console.print("from /metrics:", *answers, sep="\n  ")
        if options.keep:
            console.print(f"\nstatus page: {url}/   gRPC: {address}   Ctrl-C stops")
            with _until_interrupted():
                signal.pause()

    _title("3  Compare with the unmodified model: measured here and now")
    test = EXAMPLE / "test.npz"
    sizes = ("--batch-sizes", "1,4,16,32", "--samples", "2000")
    _run("offramp.tools.bench.cli", "eebench", "compare", BUNDLE, "--data", test, *sizes)

    _title("Look at")
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


def _title(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _run(module: str, name: str, *arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    console.print(f"$ {name} {' '.join(words)}", style="cyan")
    subprocess.run([sys.executable, "-m", module, *words], check=True, cwd=ROOT)


@contextmanager
def _serving() -> Iterator[tuple[str, str]]:
    """Run ``eeserve`` on free ports; gives the gRPC address and the status page's URL."""
    console.print(f"$ eeserve {BUNDLE} --grpc-port 0 --http-port 0", style="cyan")
    command = [sys.executable, "-m", "offramp.server.cli", str(BUNDLE)]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", "--http-port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield _wait_ready(process)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=60)
        console.print(f"eeserve stopped with exit status {status}")


def _wait_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        console.print(line.rstrip())
        if ready := READY.search(line):
            return ready[1], ready[2]
    raise SystemExit("eeserve did not start; its messages are above")


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
