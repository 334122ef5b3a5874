"""What all rooms of the engine share: errors, clocks, child processes, state files, extensions."""
