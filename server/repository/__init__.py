"""The models that a server has: found in a folder or named, loaded, replaced and unloaded."""
