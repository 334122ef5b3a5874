"""Controllers on one and the same sequence of samples, whose distribution shifts."""
