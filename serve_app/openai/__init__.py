"""OpenAI's request and response shapes, and the way between them and the engine's types."""
