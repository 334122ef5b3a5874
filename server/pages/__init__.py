"""The pages on the HTTP port: the status page and the metrics."""
