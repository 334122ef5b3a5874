"""Data sets: reading within bounded memory, groups of samples, splits, augmented samples."""
