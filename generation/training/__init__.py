"""Training of the exits of generating models in torch: adapters, heads, judges, a copy."""
