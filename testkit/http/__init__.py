"""The HTTP application over a scripted replica and an in-memory jobs service."""
