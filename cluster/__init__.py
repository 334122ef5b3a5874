"""Extension: workers on several devices or hosts serve one model (E3), by plans that change."""
