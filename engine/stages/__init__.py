"""Stage plans, made from exits and thresholds; protocols of backends; pipelines of stages."""
