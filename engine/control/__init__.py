"""Control while serving: what watches a model, and changes its exit policy. Sans I/O."""
