"""What a bundle says of the libraries that hold operators of its graphs."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle.schema.serde import check_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLibrary:
    """A shared library with operators that ONNX Runtime does not have itself.

    It is a name and a hash, never a path: a library is code, and nobody loads one that a bundle
    names, but only what whoever starts a program gives (``--custom-ops``).
    """

    file: str
    """Its file's name, without folders."""
    sha256: str
    """Of its content, 64 hexadecimal digits."""
    operators: tuple[str, ...]
    """Those that the graphs use, as ``domain:Name``."""

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or "\\" in self.file:
            raise ValueError(f"file {self.file!r:.100} is not a file's name without folders")
        check_hash(self.sha256)
        if not self.operators:
            raise ValueError("operators: a library is only named for operators that it has")

    def describe(self) -> str:
        """``ops.so (sha256 0123456789ab…; my.domain:Norm)``, for messages."""
        return f"{self.file} (sha256 {self.sha256[:12]}…; {', '.join(self.operators)})"
