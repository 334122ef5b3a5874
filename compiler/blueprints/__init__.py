"""Drafts of a bundle: choosing exits, putting copies in front of the model, and packing."""
