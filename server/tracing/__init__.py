"""The export of traces; only this package knows OpenTelemetry (extra ``otel``)."""
