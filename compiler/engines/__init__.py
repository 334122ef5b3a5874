"""Building engines for a GPU: their parts of the model, graphs, shapes and precision."""
