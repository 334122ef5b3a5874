"""Served models: options, deployments, profiles on this machine, controllers."""
