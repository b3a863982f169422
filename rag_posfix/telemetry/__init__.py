"""Telemetry: traces and metrics of questions for OpenTelemetry, off unless they are configured."""
