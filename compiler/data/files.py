"""Files in folders of data."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def files_in(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files with some suffixes, in lower case, in a folder and those inside it.

    They are in the order of their paths; files whose name begins with a dot are left out.
    """
    return sorted(
        (
            file
            for file in folder.rglob("*")
            if file.suffix.lower() in suffixes and not file.name.startswith(".") and file.is_file()
        ),
        key=lambda file: file.as_posix(),
    )
