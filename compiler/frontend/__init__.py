"""Reading a user's file: a model whose batch is symbolic, with one answer."""
