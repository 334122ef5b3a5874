"""Plans of stages, by exits and thresholds; the protocols of backends; the pipeline of stages."""
