"""Command line of ``eecompile``: its parsers, its help, and the code of each command."""
