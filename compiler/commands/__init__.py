"""Command line of ``eecompile``: its parsers, its help, and what each command runs."""
