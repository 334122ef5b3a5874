"""Supernets that several tests slice: exported, read and analysed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tests.supernet.elastic_torch import SPECS, SUPERNETS, read, shaken
from torch import nn

from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs import Supernet
from offramp.supernet.graphs.spec_file import parse_spec


@pytest.fixture(scope="session")
def full() -> Callable[[str], nn.Module]:
    """A supernet in torch, by name."""
    return cache(lambda kind: shaken(SUPERNETS[kind]()))


@pytest.fixture(scope="session")
def model(
    full: Callable[[str], nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], SourceModel]:
    """The same as it is read from a file."""
    return cache(lambda kind: read(full(kind), tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def supernet(model: Callable[[str], SourceModel]) -> Callable[[str], Supernet]:
    """The same with the spec of SPECS."""
    return cache(lambda kind: Supernet.of(model(kind), parse_spec(SPECS[kind], "s.toml")))


@pytest.fixture
def of(model: Callable[[str], SourceModel]) -> Callable[..., Supernet]:
    """A supernet with the parts of a spec that are given: ``of("cnn", depth=[…])``."""

    def make(kind: str, **content: Any) -> Supernet:
        return Supernet.of(model(kind), parse_spec(content, "s.toml"))

    return make
