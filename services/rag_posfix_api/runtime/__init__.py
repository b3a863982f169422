"""Running questions: admission, jobs in threads, streams, and the loaded pipeline."""
