"""What a bundle says of each of its files: size and hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp.bundle.schema.serde import LEFT_OUT, check_hash, check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the bundle."""

    path: str
    """Relative to the bundle, with forward slashes."""
    size_bytes: int
    sha256: str
    filled_sha256: str = field(default="", metadata=LEFT_OUT)
    """Of a graph with the weights in it that it names in ``weights.bin``, if it does: what it is,
    wherever its weights are."""

    def __post_init__(self) -> None:
        check_numbers(self, "size_bytes", least=0)
        check_hash(self.sha256)
        if self.filled_sha256:
            check_hash(self.filled_sha256)
