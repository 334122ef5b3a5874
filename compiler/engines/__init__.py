"""Building engines for a GPU: choice of units, their graphs, shapes and precision."""
