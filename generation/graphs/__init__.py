"""From an export with past keys and values to the graphs of stages, exits and propagation."""
