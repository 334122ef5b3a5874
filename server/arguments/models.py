"""Which models are served, and under what names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offramp.server.arguments.values import named_path

BUNDLE_SUFFIX: Final = ".ee"


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "bundles",
        metavar="BUNDLE",
        nargs="*",
        type=Path,
        help="folder that eecompile wrote; served under its name without .ee",
    )
    group.add_argument(
        "--model",
        metavar="NAME=PATH",
        action="append",
        default=[],
        type=named_path,
        help="a bundle and the name to serve it under; may be repeated",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="TOML file with models and their own settings; they are served besides those named "
        "here. What a model's table says goes before the command line, which goes before the "
        "tables [engine] and [defaults]",
    )


def name_models(bundles: Sequence[Path], named: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Bundle folders by name: as given, or the folder's name without ``.ee``.

    Raises:
        ValueError: There is none, or two have the same name.
    """
    unnamed = [(bundle.resolve().name.removesuffix(BUNDLE_SUFFIX), bundle) for bundle in bundles]
    models: dict[str, Path] = {}
    for name, path in (*unnamed, *named):
        if name in models:
            raise ValueError(
                f"two models are named {name!r}: {models[name]} and {path}; "
                f"give one another name, for instance --model {name}-2={path}"
            )
        models[name] = path
    if not models:
        raise ValueError("no model to serve; name a bundle that eecompile wrote: eeserve model.ee")
    return models
