"""Reading a user's file: the result is a model with a symbolic batch and one answer."""
