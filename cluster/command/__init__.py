"""The command ``eecompile plan``: its command line, what it prints, and its page."""
