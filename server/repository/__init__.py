"""The models of a server: found in a folder or named, loaded, replaced and unloaded."""
