"""The runtime, without a network: requests in, answers out; it executes the stages of bundles."""
