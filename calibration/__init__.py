"""The steps of compiling that need data: recording, training heads, profiling, choosing exits.

May import: certify, bundle, engine, engine.backends, engine.control.
"""
