"""Extension: one set of weights holds many models (SuperServe): variants of a bundle."""
