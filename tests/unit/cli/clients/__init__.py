"""Commands that use a server."""
