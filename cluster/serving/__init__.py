"""Serving by workers and plans: devices, splits, batch profiles, changes while serving."""
