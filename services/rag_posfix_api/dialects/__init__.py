"""API formats: one file each with the bodies, the questions and the events of that format."""
