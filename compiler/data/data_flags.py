"""Command-line flags for reading data, which are the same in every command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from offramp.calibration.data.data_sources import DataSource
from offramp.compiler.data.find_source import find_source
from offramp.compiler.data.reading_options import OPTIONS, TOML_NAME, PreprocessingSpec, read_toml


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of reading images, texts and tables, in a separate group."""
    group = parser.add_argument_group(
        "reading the data",
        f"For images, texts and tables. Also as keys of a TOML file, such as image_size = "
        f"[224, 224]: {TOML_NAME} in a folder of data, or --preprocessing. See docs/data.md.",
    )
    group.add_argument(
        "--preprocessing", type=Path, metavar="TOML", default=argparse.SUPPRESS,
        help="TOML file with these options; flags override it",
    )  # fmt: skip
    for option in OPTIONS:
        group.add_argument(option.flag, type=option.parse, metavar=option.metavar, help=option.help,
                           default=argparse.SUPPRESS)  # fmt: skip


def add_data(
    parser: argparse.ArgumentParser,
    help_: str,
    *,
    required: bool = True,
    besides: Sequence[str] = (),
) -> None:
    """Add ``--data``, which :func:`source_of` reads, and the options of reading data.

    ``besides`` are names of reading options that the command also uses for other purposes.
    """
    parser.set_defaults(besides_reading=besides)
    parser.add_argument("--data", required=required, metavar="DATA", help=help_)
    add_data_arguments(parser)


def spec_of(options: argparse.Namespace) -> PreprocessingSpec:
    """Return the options in the flags, completed from the file of ``--preprocessing``."""
    given = vars(options)
    spec = PreprocessingSpec(**{o.field: given[o.field] for o in OPTIONS if o.field in given})
    file: Path | None = given.get("preprocessing")
    return spec if file is None else spec.filled_from(read_toml(file))


def source_of(text: str, options: argparse.Namespace) -> DataSource:
    """Return the source of the data that ``--data`` names; DataError as in :func:`.find_source`."""
    return find_source(text, spec_of(options), besides=getattr(options, "besides_reading", ()))
