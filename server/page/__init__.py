"""What people and Prometheus see: the status page and metrics."""
