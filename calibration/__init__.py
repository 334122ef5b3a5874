"""The steps of compiling that need data: recording, training heads, profiling, choosing exits."""
