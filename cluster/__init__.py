"""Extension: several devices serve a model (E3), as workers on any host, by plans that change."""
