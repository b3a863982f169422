"""Running questions: admission, jobs in threads, and the loaded pipeline."""
