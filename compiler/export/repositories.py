"""Model repositories of other servers, which contain an exported file.

Triton and OpenVINO Model Server (OVMS) read the same layout, ``ROOT/NAME/VERSION/model.onnx``, so
one folder may serve both. Next to the file, Triton reads ``ROOT/NAME/config.pbtxt``, and OVMS
``ROOT/config.json``. KServe runs Triton on such a folder.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.bundle import Manifest
from offramp.bundle.bundle import bundle_name
from offramp.bundle.files import (
    FileContent,
    check_writable,
    pieces_of,
    put_in_place,
    read_limited,
    write_whole,
)
from offramp.compiler.common.errors import ExportError

MODEL: Final = "1/model.onnx"
README: Final = "README.md"
WRITTEN_BY: Final = "Written by `eecompile export`"
"""Beginning of a README's first paragraph; it marks a folder as an export."""
_OVMS_CONFIG: Final = "config.json"
_MOST_CONFIG_BYTES: Final = 2**24
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_STORAGE: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'\\]+")
_KIND: Final = "InferenceService"
"""Kubernetes resource kind with which KServe runs a model."""
_MOST_DNS_CHARS: Final = 63
_TITLES: Final = {"triton": "Triton", "ovms": "OpenVINO Model Server", "kserve": "KServe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Model repositories that the user asks ``eecompile export`` to write."""

    triton: Path | None = None
    """Root of a repository for Triton."""
    ovms: Path | None = None
    """Root of a repository for OpenVINO Model Server; may be the same folder as ``triton``."""
    kserve: str | None = None
    """URI at which KServe finds the repository for Triton, once it is uploaded."""
    name: str | None = None
    """Name of the model in the repository; ``None`` means the bundle's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One model in the repository of one or two servers."""

    root: Path
    name: str
    servers: tuple[str, ...]
    """Servers that read the repository: some of ``triton``, ``ovms`` and ``kserve``."""
    storage: str = ""
    """URI of ``root`` for KServe; empty without KServe."""

    @property
    def folder(self) -> Path:
        """Folder of the model in the repository."""
        return self.root / self.name

    def describe_servers(self) -> str:
        """Return text such as ``Triton, OpenVINO Model Server``, for users."""
        return ", ".join(_TITLES[server] for server in self.servers)

    def check(self, bundle: Path, *, overwrite: bool) -> None:
        """Raise ExportError or BundleWriteError for a target that cannot or must not be written."""
        option = f"--{self.servers[0]}"
        if self.folder.resolve().is_relative_to(bundle.resolve()):
            raise ExportError(
                f"{self.folder} is inside the bundle, which it would damage; choose another "
                f"{option}"
            )
        for place in (self.root, *self.root.parents):
            if place.exists() and not place.is_dir():
                raise ExportError(f"{place} is not a folder; choose another {option}")
        if self.folder.exists() or self.folder.is_symlink():
            if self.folder.is_symlink() or not _is_ours(self.folder):
                raise ExportError(
                    f"{self.folder} exists and was not written by eecompile export; choose "
                    f"another --name or {option}"
                )
            _need_overwrite(self.folder, option, overwrite=overwrite)
        elif "ovms" in self.servers and self.name in _names(self._listed()):
            _need_overwrite(
                f"{self.root / _OVMS_CONFIG} lists a model {self.name}, which",
                option,
                overwrite=overwrite,
            )
        check_writable(self.folder, option=option)

    def write(self, files: Mapping[str, FileContent]) -> None:
        """Replace the model's folder in one step, then write the files that list it for servers."""
        listing = self._listing()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{self.name}.", dir=self.root))
            try:
                for name, content in files.items():
                    place = scratch / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("wb") as file:
                        file.writelines(pieces_of(content))
                scratch.chmod(0o755)
                put_in_place(scratch, self.folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            for name, content in listing.items():
                write_whole(self.root / name, content, mode=0o644)
        except OSError as error:
            raise ExportError(
                f"{self.folder} cannot be written: {error}; free the space or choose another "
                f"--{self.servers[0]}"
            ) from error

    def _listing(self) -> dict[str, bytes]:
        """Return the files to write in the repository's root, by name."""
        files = {}
        if "ovms" in self.servers:
            listed = self._listed()
            others = [e for e in listed["model_config_list"] if _name_of(e) != self.name]
            listed["model_config_list"] = [*others, {"config": self._ovms_config()}]
            files[_OVMS_CONFIG] = (json.dumps(listed, indent=2) + "\n").encode()
        if "kserve" in self.servers:
            files[f"{self.name}.kserve.yaml"] = self._inference_service().encode()
        return files

    def _ovms_config(self) -> dict[str, Any]:
        # A relative path is relative to config.json. OpenVINO uses bfloat16 by default on CPUs that
        # have it; confidences then differ from those that were certified.
        return {
            "name": self.name,
            "base_path": self.name,
            "target_device": "CPU",
            "plugin_config": {"INFERENCE_PRECISION_HINT": "f32"},
        }

    def _listed(self) -> dict[str, Any]:
        """Return the content of OVMS's list of models, in which other models are kept."""
        place = self.root / _OVMS_CONFIG
        if not place.exists():
            return {"model_config_list": []}
        try:
            listed = json.loads(read_limited(place, _MOST_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ExportError(
                f"{place}: expected a list of models for OpenVINO Model Server in JSON ({error}); "
                "mend or remove it, or choose another --ovms"
            ) from error
        if not isinstance(listed, dict) or not isinstance(listed.get("model_config_list"), list):
            raise ExportError(
                f'{place} has no list "model_config_list", as OpenVINO Model Server expects; mend '
                "or remove it, or choose another --ovms"
            )
        return listed

    def _inference_service(self) -> str:
        return f"""\
apiVersion: serving.kserve.io/v1beta1
kind: {_KIND}
metadata:
  name: {dns_label(self.name)}
spec:
  predictor:
    model:
      modelFormat:
        name: triton
      runtime: kserve-tritonserver
      protocolVersion: v2
      storageUri: {json.dumps(self.storage)}
"""


def repositories(options: RepositoryOptions, bundle: Path) -> tuple[Repository, ...]:
    """Return the requested repositories; ExportError for an invalid URI or name."""
    if options.kserve is not None and not _STORAGE.fullmatch(options.kserve):
        raise ExportError(
            f"--kserve {options.kserve!r} is not a URI, expected the one where KServe will find "
            "the repository, such as s3://bucket/models or pvc://claim/models"
        )
    if options.triton is None and options.ovms is None:
        return ()
    name = bundle_name(bundle.resolve()) if options.name is None else options.name
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} cannot name a model: servers accept at most 100 letters, digits, '_', '-' "
            "and '.', with a letter or digit first; choose another --name"
        )
    servers: dict[Path, list[str]] = {}
    for server, root in (("triton", options.triton), ("ovms", options.ovms)):
        if root is not None:
            servers.setdefault(root.resolve(), []).append(server)
    # Messages name the path as the user typed it.
    typed = {root.resolve(): root for root in (options.ovms, options.triton) if root is not None}
    return tuple(
        Repository(
            root=typed[place],
            name=name,
            servers=(*some, "kserve") if options.kserve and "triton" in some else tuple(some),
            storage=options.kserve or "",
        )
        for place, some in servers.items()
    )


def check_model(manifest: Manifest, bundle: Path) -> None:
    """Raise ExportError for a model that servers cannot load from a repository."""
    for spec in manifest.declared:
        if not spec.shape or isinstance(spec.shape[0], int):
            raise ExportError(
                f"{bundle}: input {spec.describe()} is not read and has no batch dimension, which "
                "servers need for batching; remove it from the model's inputs and compile again, "
                "or export with --output alone"
            )
    for library in manifest.custom_ops:
        raise ExportError(
            f"{bundle}: the model needs operators of {library.describe()}, which servers of a "
            "repository do not have; export with --output alone, and configure the server for them"
        )


def dns_label(name: str) -> str:
    """Return a name in the form that Kubernetes requires.

    It consists of lower-case letters, digits and hyphens, and begins with a letter.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())
    if not label[0].isalpha():
        label = f"model-{label}"
    return label[:_MOST_DNS_CHARS].strip("-")


def _need_overwrite(what: object, option: str, *, overwrite: bool) -> None:
    if not overwrite:
        raise ExportError(f"{what} exists; choose another --name or {option}, or add --overwrite")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder has the files that every export writes."""
    try:
        said = read_limited(folder / README, _MOST_CONFIG_BYTES)
    except OSError:
        return False
    return WRITTEN_BY.encode() in said and (folder / MODEL).is_file()


def _names(listed: Mapping[str, Any]) -> set[Any]:
    return {_name_of(entry) for entry in listed["model_config_list"]}


def _name_of(entry: object) -> Any:
    """Return the name of a model in OVMS's list; ``None`` for an invalid entry."""
    config = entry.get("config") if isinstance(entry, dict) else None
    name = config.get("name") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None
