"""Converts TensorRT's wheel to an archive that is a third smaller, and that to a folder.

Its libraries contain similar code for many GPUs. Zstandard finds repetitions within 128 MB, a
wheel's compression only within 32 KB. The plugin library is omitted: we do not use it, and it loads
only if cuDNN and cuBLAS are installed. ``setup.sh`` puts an empty one in its place.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

_LEFT_OUT = ("tensorrt/libnvinfer_plugin.so.8",)
_WINDOW_LOG = 27
_LEVEL = 12


def pack(wheel: Path, archive: Path) -> None:
    """Make an archive of a wheel's files."""
    zstandard = _zstandard()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True, threads=-1
    )
    scratch = archive.with_name(archive.name + ".part")
    with (
        zipfile.ZipFile(wheel) as source,
        scratch.open("wb") as file,
        zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file) as stream,
        tarfile.open(fileobj=stream, mode="w|") as target,
    ):
        for info in source.infolist():
            if info.filename not in _LEFT_OUT:
                entry = tarfile.TarInfo(info.filename)
                entry.size = info.file_size
                with source.open(info) as content:
                    target.addfile(entry, content)
    scratch.replace(archive)


def unpack(archive: Path, folder: Path) -> None:
    """Put an archive's files into a folder that is on Python's path."""
    zstandard = _zstandard()
    reader = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
    with archive.open("rb") as file, reader.stream_reader(file) as stream:
        buffered: Any = io.BufferedReader(stream, 1 << 20)
        with tarfile.open(fileobj=buffered, mode="r|") as source:
            for entry in source:
                target = folder / entry.name
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise ValueError(f"{entry.name} leads out of {folder}")
                source.extract(entry, folder)


def _zstandard() -> Any:
    """Import the package zstandard, which setup.sh has installed; only this module needs it."""
    import zstandard  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    return zstandard


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("pack", help="turn a wheel into an archive")
    command.add_argument("source", type=Path, metavar="WHEEL")
    command.add_argument("target", type=Path, metavar="ARCHIVE")
    command.set_defaults(run=pack)
    command = commands.add_parser("unpack", help="unpack an archive into a folder")
    command.add_argument("source", type=Path, metavar="ARCHIVE")
    command.add_argument("target", type=Path, metavar="FOLDER")
    command.set_defaults(run=unpack)
    options = parser.parse_args()
    options.run(options.source, options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
