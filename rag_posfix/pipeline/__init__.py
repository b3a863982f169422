"""The pipeline: the path of one question, and the one place where concrete parts are chosen."""
