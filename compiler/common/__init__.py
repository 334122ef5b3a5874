"""What all rooms of the compiler share: options, errors, progress, memory, rounding."""
