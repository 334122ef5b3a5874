"""Which exits and thresholds are in use, on recorded answers, and why none is."""
