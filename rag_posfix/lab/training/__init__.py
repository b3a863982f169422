"""Training: models and adapters that read all places of a prompt evenly, by a loss through the plans of inference."""
