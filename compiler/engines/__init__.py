"""Building engines for a GPU: which, of what, for which shapes. Nothing here names TensorRT."""
