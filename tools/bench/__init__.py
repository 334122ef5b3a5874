"""``eebench``: measures and simulates bundles and servers; every figure names its origin."""
