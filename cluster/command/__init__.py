"""The command ``eecompile plan``: its command line, output and page."""
