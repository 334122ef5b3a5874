"""What all packages of the server share: its errors, and the engine as it sees it."""
