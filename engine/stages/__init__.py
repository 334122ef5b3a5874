"""From exits and thresholds to stages; the protocols of backends, and the pipeline."""
