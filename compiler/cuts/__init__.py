"""Finding places to cut a model, and cutting it into segments that are compared with the model."""
