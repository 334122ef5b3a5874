"""What needs data: reading, recording, training of heads, profiling, selection."""
