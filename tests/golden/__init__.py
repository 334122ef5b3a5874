"""Test of unchanged behaviour: recorded figures, and a comparison of two checkouts.

``bundle/`` is a bundle of recorded answers, so that its graphs return the same bits on every
machine; ``fresh.npz`` is data of the same kind that its records do not have. ``cases`` defines the
recordings in ``recorded/``, ``test_golden`` compares the code with them, and ``compare`` compares
two checkouts to the last bit, training and compilation included. If modules move, update
``entry_points``.
"""
