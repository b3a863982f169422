"""Generation: loading models, running plans on them, streaming, and the langchain chat model."""
