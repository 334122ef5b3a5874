"""Hold one checkout against another, to the last bit, on this machine.

    python -m tests.golden.compare OLD NEW [--quick] [--keep FOLDER] [--ignore report.html]

In both checkouts the recorded cases run (``tests.golden.cases``), and tiny models and the shipped
example, on a part of its data, are compiled, compared, exported and so on, on a
virtual clock (``tests.golden.virtual_clock``), from the same seed. Then all that they wrote and
printed is compared byte by byte, but for what :data:`VOLATILE` lists. Both run the ``tests/golden``
of NEW, each with its own ``entry_points.py``, since modules may have moved. The exit status is 0 if
nothing differs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = "examples/fashion"
TINY = "--epochs 3 --max-disagreement 0.2"
FEW = f"{TINY} --candidates 2 --max-samples 1000 --augment off"
QUICK = (
    f"""eecompile {{given}}/images.onnx --data {{given}}/images.npz --output {{out}}/images.ee
        {TINY} --candidates 3""",
    f"""eecompile {{given}}/sentences.onnx --data {{given}}/sentences.npz
        --output {{out}}/sentences.ee {TINY} --candidates 3 --seed 1
        --selection pame --rehearsal-batch 16 --max-violations 0.2""",
    """eebench compare {out}/sentences.ee --data {given}/sentences.npz --samples 96 --rounds 2
        --batch-sizes 1,8 --json {out}/compare-sentences.json""",
    f"""eecompile {{given}}/images.onnx --data {{given}}/images.npz --output {{out}}/bridges.ee
        {FEW} --heads both""",
    f"""eecompile {{given}}/pairs.onnx --data {{given}}/pairs.npz --output {{out}}/pairs.ee
        {TINY} --exits 20%,30%-50% --criterion learned --group pair --max-class-disagreement 0.4""",
    f"""eecompile {{given}}/vectors.onnx --data {{given}}/vectors.npz --output {{out}}/patience.ee
        {FEW} --criterion patience""",
    f"""eecompile {{given}}/vectors.onnx --data {{given}}/vectors.npz --output {{out}}/joint.ee
        {FEW} --train joint""",
    f"""eecompile {{given}}/vectors.onnx --data {{given}}/vectors.npz --output {{out}}/int8.ee
        {FEW} --precision int8""",
    f"""eecompile {{given}}/pixels.onnx --data {{given}}/pixels.npz --output {{out}}/pixels.ee
        {FEW} --class-map --agree-share 0.5""",
    f"""eecompile {{given}}/values.onnx --data {{given}}/values.npz --output {{out}}/values.ee
        {FEW} --task regression --agree-within 1.5""",
    "eecompile {given}/sentences.onnx --data random --output {out}/random.ee --candidates 2",
    "eecompile wrap {given}/images.onnx --output {out}/wrapped.ee",
    """eecompile rehearse {out}/images.ee --data {given}/reversed.npz --output {out}/rehearsed.ee
        --from-scratch --max-disagreement 0.1 --rehearsal-batch 8""",
    """eecompile export {out}/images.ee --data {given}/images.npz --output {out}/exported.onnx
        --with-exits""",
    """eecompile export {out}/sentences.ee --data {given}/sentences.npz --triton {out}/repository
        --ovms {out}/repository""",
    "eecompile verify {out}/int8.ee --data {given}/vectors.npz",
    "eecompile profile {out}/pairs.ee",
    "eecompile inspect {given}/sentences.onnx",
    "eecompile inspect {out}/bridges.ee",
)
"""Commands on tiny models."""
SHIPPED = (
    f"""eecompile {EXAMPLE}/fashion_resnet56.onnx --data {{given}}/shipped.npz
        --output {{out}}/shipped.ee --candidates 3 --epochs 2 --max-disagreement 0.02""",
    f"""eebench compare {{out}}/shipped.ee --data {EXAMPLE}/test.npz --samples 96 --rounds 2
        --batch-sizes 1,8 --json {{out}}/compare-shipped.json""",
)
"""Commands on the shipped example; some minutes."""
SAMPLES = 1600
"""Number of samples of the shipped example's data."""
VOLATILE = {
    "manifest.sha256": "the hash of what names the time",
    "manifest.json: created_utc": "the time",
    "manifest.json: tools.offramp": "the version",
    "manifest.json: files[report.html]": "the hash of what names the time",
    "report.html: dates and times": "the time",
    "compare-*.json: environment": "machine, versions and time",
    "output-*.txt: Took": "memory",
}


def main() -> int:
    """Run both, compare, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave the shipped example out")
    parser.add_argument("--keep", type=Path, help="write what is compared there, and keep it")
    parser.add_argument("--ignore", action="append", default=[], metavar="NAME", help="of a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = (options.keep or Path(folder)).resolve()
        sides = [place / "old", place / "new"]
        commands = QUICK if options.quick else QUICK + SHIPPED
        checkouts = [options.old.resolve(), options.new.resolve()]
        if checkouts[0] != checkouts[1]:
            checkouts[0] = overlaid(*checkouts, Path(folder, "checkout"))
        make_inputs(checkouts[1], place / "given")
        with ThreadPoolExecutor(4) as pool:  # times are virtual, so they may disturb each other
            pending = [
                task
                for side, checkout in zip(sides, checkouts, strict=True)
                for task in (
                    pool.submit(run_cases, checkout, out=side),
                    pool.submit(run_commands, checkout, commands, given=place / "given", out=side),
                )
            ]
        for done in pending:
            done.result()
        compared, differing = 0, 0
        for name, words in differences(*sides, ignored=set(options.ignore)):
            compared += 1
            if words:
                differing += 1
                print(f"DIFFERS {name}\n{words}")
    print(f"{compared} files compared, {differing} differ; left out of them:")
    for what, why in VOLATILE.items():
        print(f"  {what}: {why}")
    return int(differing > 0)


def overlaid(old: Path, new: Path, folder: Path) -> Path:
    """Return a folder that links to ``old``, with the ``tests/golden`` of ``new`` in it.

    So both are recorded alike, whatever cases ``old`` has. Only ``entry_points.py`` is its
    own, as modules may have moved.
    """
    golden = Path("tests") / "golden"
    for origin, part, kept in (
        (old, Path(), {"tests"}),
        (old, Path("tests"), {"golden"}),
        (new, golden, {"entry_points.py"}),
    ):
        (folder / part).mkdir(parents=True)
        for item in (origin / part).iterdir():
            if item.name not in kept:
                (folder / part / item.name).symlink_to(item)
    own = old / golden / "entry_points.py"
    (folder / golden / own.name).symlink_to(own if own.exists() else new / golden / own.name)
    return folder


def make_inputs(checkout: Path, folder: Path) -> None:
    """Write the models and data that both compile."""
    folder.mkdir(parents=True)
    _python(checkout, "-m", "tests.golden.tiny", str(folder))
    with np.load(folder / "images.npz") as archive:  # rehearse refuses what a bundle was made of
        np.savez(folder / "reversed.npz", **{k: archive[k][::-1] for k in archive.files})
    with np.load(checkout / EXAMPLE / "calibration.npz") as archive:
        np.savez(folder / "shipped.npz", **{k: archive[k][:SAMPLES] for k in archive.files})


def run_commands(checkout: Path, commands: Sequence[str], *, given: Path, out: Path) -> None:
    """Run commands in a checkout, on the virtual clock, and keep what they print."""
    out.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(commands):
        arguments = line.format(given=given, out=out).split()
        printed = _python(checkout, "-m", "tests.golden.virtual_clock", *arguments)
        name = f"output-{number:02d}-{arguments[0]}.txt"
        (out / name).write_text(printed.replace(str(out), "OUT"))


def run_cases(checkout: Path, *, out: Path) -> None:
    """Run the recorded cases in a checkout."""
    _python(checkout, "-m", "tests.golden.cases", "write", str(out / "cases"))


def differences(old: Path, new: Path, *, ignored: set[str]) -> Iterator[tuple[str, str]]:
    """Yield every file of either folder that differs, with the difference."""
    names = {p.relative_to(side).as_posix() for side in (old, new) for p in side.rglob("*.*")}
    for name in sorted(names):
        places = [side / name for side in (old, new)]
        if Path(name).name in {"manifest.sha256", *ignored} or any(p.is_dir() for p in places):
            continue
        missing = [p for p in places if not p.is_file()]
        if missing:
            yield name, f"  there is no {missing[0]}"
            continue
        contents = [comparable(p) for p in places]
        yield name, "" if contents[0] == contents[1] else _difference(*contents)


def comparable(path: Path) -> bytes:
    """The content of a file without what :data:`VOLATILE` lists."""
    content = path.read_bytes()
    if path.name == "report.html":
        return re.sub(rb"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?([+-]\d\d:\d\d)?)?", b"TIME", content)
    if path.name == "manifest.json":
        document = json.loads(content)
        document["created_utc"] = "TIME"
        document["tools"].pop("offramp")
        document["files"] = [f for f in document["files"] if f["path"] != "report.html"]
        return _dump(document)
    if path.name.startswith("output-"):
        return re.sub(rb"^Took: .*\n", b"", content, flags=re.MULTILINE)
    if path.name.startswith("compare-"):
        return _dump({k: v for k, v in json.loads(content).items() if k != "environment"})
    return content


def _dump(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode()


def _difference(old: bytes, new: bytes) -> str:
    """A few lines of what differs."""
    try:
        texts = [content.decode().splitlines() for content in (old, new)]
    except UnicodeDecodeError:
        return f"  {len(old):,} and {len(new):,} bytes"
    lines = list(difflib.unified_diff(*texts, "old", "new", lineterm="", n=0))
    return "\n".join(f"  {line[:200]}" for line in lines[:12])


def _python(checkout: Path, *arguments: str) -> str:
    """Run a module of a checkout with its own code, and return what it printed."""
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
