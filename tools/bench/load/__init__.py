"""A load generator for servers of the Open Inference Protocol."""
