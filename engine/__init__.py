"""The runtime that executes bundles' stages; imports bundle and certify, and knows no network."""
