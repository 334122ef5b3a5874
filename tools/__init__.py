"""``eebench`` and the scripts that made the examples."""
