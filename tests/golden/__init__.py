"""What "behaviour unchanged" means: recorded figures, and a comparison of two checkouts.

``bundle/`` is a bundle of recorded answers, so that its graphs give the same bits on every
machine; ``fresh.npz`` is data of the same kind that its records do not have. ``cases`` is what is
recorded in ``recorded/``, ``test_golden`` holds the code against that, and ``compare`` holds two
checkouts against each other to the last bit, training and compilation included. Where modules
move, ``entry_points`` is what has to follow.
"""
