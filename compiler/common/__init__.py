"""Shared by all packages of the compiler: options, errors, progress, memory, rounding."""
