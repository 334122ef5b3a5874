"""What pyproject.toml cannot say: no build of half a tree, and a source archive that is the tree.

The packages are the top-level folders, and ``src/offramp`` only links to them. Where the links did
not survive (git without symlinks, a download as zip), setuptools would find nothing to install and
succeed; so every build looks first. And where setuptools would copy the linked files into the
source archive, the links themselves belong there: what is unpacked is then what was cloned.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
LINKS = Path("src", "offramp")
NO_PACKAGES = {"tests"}
"""Top-level folders with an ``__init__.py`` that are not part of offramp."""


def missing_packages(root: Path) -> list[str]:
    """Packages that a build of the tree at ``root`` would leave out, sorted by name.

    Each top-level folder with an ``__init__.py`` is a package, and so is whatever has a name
    below ``src/offramp``, even where it leads to no folder.
    """
    folders = {path.parent.name for path in root.glob("*/__init__.py")} - NO_PACKAGES
    entries = {path.name for path in (root / LINKS).iterdir() if "." not in path.name}
    entries.discard("__pycache__")
    return sorted(
        name for name in folders | entries if not (root / LINKS / name / "__init__.py").is_file()
    )


class LinkedSdist(sdist):
    """A source archive in which the links below ``src/offramp`` are links."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Write each file where it lies, not where a link shows it, and then the links."""
        links = {path: path.readlink() for path in LINKS.iterdir() if path.is_symlink()}
        super().make_release_tree(base_dir, sorted({real_place(file) for file in files}))
        for path, target in links.items():
            Path(base_dir, path).symlink_to(target, target_is_directory=True)


def real_place(file: str) -> str:
    """The path of a file relative to the tree's root, with no link on the way."""
    return str(Path(file).resolve().relative_to(ROOT))


if missing := missing_packages(ROOT):
    sys.exit(
        f"offramp: {LINKS.as_posix()} does not lead to {', '.join(missing)}: this tree lost its "
        "symbolic links; get it anew with `git clone -c core.symlinks=true` "
        "(on Windows turn on Developer Mode first), or install a wheel"
    )

setup(cmdclass={"sdist": LinkedSdist})
