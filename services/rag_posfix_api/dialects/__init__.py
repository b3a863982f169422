"""Wire formats: one folder each with parse, render, schemas and errors of that format."""
