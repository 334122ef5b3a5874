"""Splitting of files into parts of one size, for separate transfer, and joining.

The file is self-contained: any Python from 3.8 runs it, before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20


def split(source: Path, folder: Path, part_bytes: int) -> list[str]:
    """Split all files under ``source`` into folders ``part-00``, … of ``folder``.

    The manifest is in the first part. Files are ordered by name, so names decide which are
    transferred first.

    Returns:
        One line per part: its name, size and content.
    """
    for old in folder.glob("part-[0-9][0-9]"):
        shutil.rmtree(old)
    number, used = 0, 0
    files: list[dict[str, Any]] = []
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        pieces: list[dict[str, str]] = []
        with path.open("rb") as file:
            left = path.stat().st_size
            while left or not pieces:
                if used >= part_bytes:
                    number, used = number + 1, 0
                data = file.read(min(left, part_bytes - used))
                part = "part-%02d" % number  # noqa: UP031 - as everywhere in this file, plain
                name = f"{path.name}.{len(pieces):03d}"
                target = folder / part / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                digest = hashlib.sha256(data).hexdigest()
                pieces.append({"file": f"{part}/{name}", "sha256": digest})
                left -= len(data)
                used += len(data)
        files.append(
            {
                "path": path.relative_to(source).as_posix(),
                "size_bytes": path.stat().st_size,
                "sha256": hash_of(path),
                "pieces": pieces,
            }
        )
    parts = ["part-%02d" % index for index in range(number + 1)]  # noqa: UP031
    manifest = {"parts": parts, "files": files}
    (folder / parts[0] / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return [_describe(folder / part) for part in parts]


def join(folder: Path, target: Path) -> list[str]:
    """Join the present parts; a file with missing parts waits for a later call.

    Returns:
        The missing parts.

    Raises:
        ValueError: A piece differs from the manifest.
        FileNotFoundError: The first part is missing.
    """
    manifest = json.loads((folder / "part-00" / MANIFEST).read_text())
    for file in manifest["files"]:
        path = target / file["path"]
        if path.is_file() and path.stat().st_size == file["size_bytes"]:
            continue  # a complete file was checked before it got its name
        pieces = [(folder / piece["file"], piece["sha256"]) for piece in file["pieces"]]
        if all(piece.is_file() for piece, _ in pieces):
            _join_file(path, pieces, file)
    return [part for part in manifest["parts"] if not (folder / part).is_dir()]


def _join_file(path: Path, pieces: list[tuple[Path, str]], file: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".joining")
    whole = hashlib.sha256()
    with scratch.open("wb") as out:
        for piece, expected in pieces:
            data = piece.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise ValueError(f"{piece} is damaged: transfer it again")
            whole.update(data)
            out.write(data)
    if whole.hexdigest() != file["sha256"]:
        raise ValueError(f"{path.name} is damaged: collect the files again")
    scratch.replace(path)


def hash_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _describe(part: Path) -> str:
    files = sorted(part.iterdir())
    size = sum(file.stat().st_size for file in files)
    first, last = files[0].name, files[-1].name
    return f"{part.name}  {size / 1e6:5.1f} MB  {len(files)} files, {first} to {last}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("split", help="split the files of a folder into parts")
    command.add_argument("source", type=Path)
    command.add_argument("folder", type=Path, help="folder to write part-00, part-01, … into")
    command.add_argument("--megabytes", type=int, default=60, help="size of a part (default: 60)")
    command = commands.add_parser("join", help="join the files of parts")
    command.add_argument("folder", type=Path, help="folder with part-00, part-01, …")
    command.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.command == "split":
        print("\n".join(split(options.source, options.folder, options.megabytes * 1_000_000)))
        return 0
    try:
        absent = join(options.folder, options.target)
    except (ValueError, FileNotFoundError) as error:
        print(f"parts: {error}", file=sys.stderr)
        return 1
    if absent:
        print(f"parts not here (yet): {' '.join(absent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
