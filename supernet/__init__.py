"""Extension: several models share one set of weights (SuperServe), as variants of a bundle."""
