"""The schema of a bundle's files: frozen facts, checked as they are read."""
