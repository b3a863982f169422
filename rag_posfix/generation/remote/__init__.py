"""Remote generators: any OpenAI-compatible server writes the answer; it applies its own chat template."""
