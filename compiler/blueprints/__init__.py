"""Drafts of a bundle: chosen exits, copies in front of the model, packing."""
