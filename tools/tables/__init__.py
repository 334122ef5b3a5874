"""Tables of README and docs: for each, the results that it is made from, and its rows."""
