"""Modules that all packages of the engine share: errors, clocks, processes, state files."""
