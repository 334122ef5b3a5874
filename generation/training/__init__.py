"""Train what generating models answer at their exits, in torch: adapters, heads, judges, a copy."""
