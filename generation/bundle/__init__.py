"""A generating model on the disk: its manifest, its graphs, and the names of their tensors."""
