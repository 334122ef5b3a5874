"""What pyproject.toml cannot say: no build of half a tree, no scripts of ours in a wheel.

The packages are the top-level folders, and ``src/offramp`` only links to them. Where the links did
not survive (git without symlinks, a download as zip), setuptools would find nothing to install and
succeed; so every build looks first. And where setuptools would copy the linked files into the
source archive, the links themselves belong there: what is unpacked is then what was cloned.
A wheel has no scripts for those who develop offramp; editable installs and the archive have them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
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


class ProductBuild(build_py):
    """The files of a wheel: of ``tools`` only ``bench``, the rest is for who develops offramp."""

    def finalize_options(self) -> None:
        """Leave out packages that are scripts of ours."""
        super().finalize_options()
        tools, bench = "offramp.tools.", "offramp.tools.bench."
        self.packages = [
            name
            for name in self.packages
            if not name.startswith(tools) or f"{name}.".startswith(bench)
        ]

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Leave out modules that lie in ``tools`` itself."""
        found = super().find_package_modules(package, package_dir)
        return [m for m in found if package != "offramp.tools" or m[1] == "__init__"]


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
        "symbolic links; clone it with `git clone -c core.symlinks=true` "
        "(on Windows turn on Developer Mode first), or install a wheel"
    )

setup(cmdclass={"build_py": ProductBuild, "sdist": LinkedSdist})
