"""Compiling a model that generates text: prompts in, a generating bundle out."""
