"""Export of traces; only this package uses OpenTelemetry (extra ``otel``)."""
