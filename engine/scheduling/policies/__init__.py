"""The policies of the papers, a small class each; :mod:`..factory` makes them by name."""
