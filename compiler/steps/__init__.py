"""The steps of the commands that compile, check and rehearse a bundle."""
