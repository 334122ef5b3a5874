"""Code that all packages of the compiler share: options, errors, progress, memory, rounding."""
