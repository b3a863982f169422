"""The routes: each translates between a wire format and the pipeline, and nothing else."""
