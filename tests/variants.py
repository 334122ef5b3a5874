"""Bundles with variants: a model, and subnets of it that were compiled as cascades before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offramp.bundle import Bundle, ExitPolicy, Variant, write_bundle
from offramp.bundle.bundle import MANIFEST, MANIFEST_HASH, POLICY, RECORDS
from offramp.bundle.files import FileContent, dump
from offramp.bundle.schema.parts import folder_of

PROFILE = "profiles/cpu.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetBundle:
    """A subnet of a model, compiled as a cascade: exits, its own answer, then the model itself."""

    name: str
    bundle: Bundle

    def as_variant(self, index: int) -> Variant:
        """Describe it as a variant of the model, with files in the variant's folder."""
        manifest, folder = self.bundle.manifest, folder_of(index)
        *segments, source = manifest.segments
        return Variant(
            index=index,
            name=self.name,
            segments=(*(replace(s, file=folder + s.file) for s in segments), source),
            exits=tuple(replace(e, file=folder + e.file) for e in manifest.exits),
        )

    def files(self, index: int) -> dict[str, FileContent]:
        """Return its files, by their path among those of the whole bundle."""
        manifest, folder = self.bundle.manifest, folder_of(index)
        names = [s.file for s in manifest.segments[:-1]] + [e.file for e in manifest.exits]
        content: dict[str, FileContent] = {
            folder + name: self.bundle.read(name) for name in (*names, RECORDS, PROFILE)
        }
        return {**content, folder + POLICY: dump(self.bundle.policy)}


def write_with_variants(
    target: Path, full: Bundle, subnets: Sequence[SubnetBundle], *, overwrite: bool = False
) -> Bundle:
    """Write a bundle of a model and of subnets of it, which become its variants 1, 2 ….

    All were compiled of the same source model with the same data. Errors are those of
    :func:`~offramp.bundle.write_bundle`.
    """
    variants = tuple(s.as_variant(number) for number, s in enumerate(subnets, 1))
    files: dict[str, FileContent] = {
        entry.path: full.read(entry.path)
        for entry in full.manifest.files
        if entry.path not in (MANIFEST, MANIFEST_HASH, POLICY)
    }
    for number, subnet in enumerate(subnets, 1):
        files |= subnet.files(number)
    manifest = replace(full.manifest, files=(), variants=variants)
    policy: ExitPolicy = full.policy
    contents: Mapping[str, FileContent] = files
    return write_bundle(target, manifest, policy, contents, overwrite=overwrite)
