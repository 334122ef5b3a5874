"""Times of graphs and policies, measured in turns, with intervals."""
