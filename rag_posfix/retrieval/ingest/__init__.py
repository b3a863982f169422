"""Ingest: files of many types in, passages out."""
