"""Controllers and threshold searches that others published, for comparison with ours."""
