"""The runtime: executes the stages of bundles; no network in it."""
