"""The folder for learning of a model: its place, its owner, and its files.

::

    MODEL.learn/       0700, used by one server at a time
      lock             held while a server uses it
      learning.json    state of learning
      inputs.log       recorded inputs, until they are compiled
      progress.jsonl   progress of the running compilation
      1.ee, 2.ee …     compiled bundles: the one that serves, or the one being compiled
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from offramp.bundle import Bundle, BundleError
from offramp.bundle.graph_weights import external_locations
from offramp.bundle.locks import FileLock
from offramp.bundle.npz import open_regular
from offramp.engine.common.errors import OptionsError
from offramp.engine.learning.compilation import PROGRESS_NAME
from offramp.engine.learning.recording_file import LOG_NAME
from offramp.proto.wire_format import WireError

SUFFIX: Final = ".learn"
_OURS: Final = re.compile(r"\.?(\d+)\.ee(\..*)?")
"""Names of numbered bundles, of servers' files next to them, and of unfinished bundles."""
_PIECE_BYTES: Final = 2**20


class LearnFolder:
    """A learn folder that this process has locked."""

    def __init__(self, path: Path) -> None:
        """Make the folder, or use an existing one; OptionsError if that is impossible."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            if found.st_uid != os.geteuid():
                raise OptionsError(
                    f"{path} belongs to user {found.st_uid}, but this server runs as user "
                    f"{os.geteuid()}; name a folder of your own (--learn-folder)"
                )
            if stat.S_IMODE(found.st_mode) != 0o700:
                path.chmod(0o700)
        except OSError as error:
            raise OptionsError(
                f"{path} cannot be used for learning: {error.strerror}; name a folder that can be "
                "written (--learn-folder)"
            ) from error
        self._lock = FileLock(path / "lock")  # only now: the folder could belong to another user
        if not self._lock.take():
            raise OptionsError(
                f"{path} is in use by another server; stop that, or name another folder "
                "(--learn-folder)"
            )
        self.progress.unlink(missing_ok=True)  # left by a killed server

    @property
    def progress(self) -> Path:
        """File with the progress of compilations."""
        return self.path / PROGRESS_NAME

    def bundle(self, number: int) -> Path:
        """Return the path of a compiled bundle."""
        return self.path / f"{number}.ee"

    def open_bundle(self, number: int) -> Bundle | None:
        """Open a compiled bundle; ``None`` if there is no complete one."""
        try:
            return Bundle.open(self.bundle(number)) if number else None
        except BundleError:
            return None

    def next_number(self) -> int:
        """Return an unused bundle number."""
        return 1 + max((number for number, _ in self._numbered()), default=0)

    def remove_others(self, *numbers: int) -> None:
        """Remove all unfinished bundles, and all finished bundles except these ``numbers``."""
        for number, place in list(self._numbered()):
            if number not in numbers or place.name.startswith("."):
                _remove(place)

    def remove_recording(self) -> None:
        """Remove the files with recorded inputs."""
        for name in (LOG_NAME, f"{LOG_NAME}.new"):
            _remove(self.path / name)

    def release(self) -> None:
        """Release the folder for another server."""
        self._lock.release()

    def _numbered(self) -> Iterator[tuple[int, Path]]:
        for place in self.path.iterdir():
            if (name := _OURS.fullmatch(place.name)) is not None:
                yield int(name[1]), place


def folder_of(model: Path, name: str, folder: Path | None) -> Path:
    """Return the path of the learn folder for a model that is served under a name."""
    if folder is None:
        return model.with_name(f"{model.name.removesuffix('.onnx')}{SUFFIX}")
    return folder / f"{name.replace(os.sep, '_')}{SUFFIX}"


def model_sha256(model: Path) -> str:
    """Return the hash of an ONNX file and of its weight files; OSError if unreadable."""
    with open_regular(model) as file:
        content = file.read()
    digest = hashlib.sha256(content)
    with contextlib.suppress(WireError):  # reported when the model is read
        for location in sorted(external_locations(content)):
            if _is_inside(location):
                with open_regular(model.parent / location) as file:
                    for piece in iter(lambda: file.read(_PIECE_BYTES), b""):
                        digest.update(piece)
    return digest.hexdigest()


def _is_inside(location: str) -> bool:
    pure = PurePosixPath(location)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)
