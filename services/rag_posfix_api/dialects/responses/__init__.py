"""OpenAI responses: text, whole and as events."""
