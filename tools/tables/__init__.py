"""Tables of README and docs: the results that each table is made from, and its rows."""
