"""Files in parts: split, carried one by one, joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offramp.tools.gpu.parts import join, split

SIZES = {"1/small": 10, "1/none": 0, "2/large": 2500, "2/next": 700}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(size))
    return tmp_path / "source"


def test_what_is_joined_is_what_was_split(source: Path, tmp_path: Path) -> None:
    lines = split(source, tmp_path / "parts", 1000)
    assert [line.split()[0] for line in lines] == ["part-00", "part-01", "part-02", "part-03"]
    for part in (tmp_path / "parts").iterdir():
        content = sum(f.stat().st_size for f in part.iterdir() if f.name != "manifest.json")
        assert 0 < content <= 1000
    assert join(tmp_path / "parts", tmp_path / "joined") == []
    for name in SIZES:
        assert (tmp_path / "joined" / name).read_bytes() == (source / name).read_bytes()


def test_files_wait_for_their_parts(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "parts", 1000)
    joined, later = tmp_path / "joined", tmp_path / "later"
    (tmp_path / "parts" / "part-02").rename(later)
    assert join(tmp_path / "parts", joined) == ["part-02"]
    there = {path.relative_to(joined).as_posix() for path in joined.rglob("*") if path.is_file()}
    assert there == {"1/small", "1/none"}
    later.rename(tmp_path / "parts" / "part-02")
    assert join(tmp_path / "parts", joined) == []
    assert (joined / "2/large").read_bytes() == (source / "2/large").read_bytes()


def test_a_damaged_piece_is_named(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "parts", 1000)
    piece = tmp_path / "parts" / "part-01" / "large.001"
    piece.write_bytes(piece.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=r"large\.001 is damaged: transfer it again"):
        join(tmp_path / "parts", tmp_path / "joined")
    assert not (tmp_path / "joined" / "2/large").exists()


def test_splitting_again_leaves_no_part_of_before(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "parts", 100)
    assert len(split(source, tmp_path / "parts", 10_000)) == 1
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["part-00"]
