"""Drafts of a bundle: exits that are chosen, copies before the model, packing."""
