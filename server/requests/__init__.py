"""Requests: their admission, and their conversion to engine calls and back to responses."""
