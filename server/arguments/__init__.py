"""The command line of ``eeserve``, with its options grouped by topic."""

from offramp.server.arguments.command_line import (
    Arguments,
    make_parser,
    parse_arguments,
    read_arguments,
)

__all__ = ["Arguments", "make_parser", "parse_arguments", "read_arguments"]
