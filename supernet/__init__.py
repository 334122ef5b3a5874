"""Extension: one set of weights contains several models (SuperServe), as variants of a bundle."""
