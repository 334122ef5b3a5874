"""Shared parts of ``eebench`` commands: arguments, traces, outcomes, pages."""
