"""Times of graphs and policies, measured in alternation, with intervals."""
