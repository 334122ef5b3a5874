"""Where a model may be cut, and cutting it: segments that are verified against the model."""
