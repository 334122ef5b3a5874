"""Code that all packages of the server share: errors, and its interface to the engine."""
