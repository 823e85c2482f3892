"""One module for each version, oldest first; a published one is never changed."""
