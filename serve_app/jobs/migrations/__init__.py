"""How the database came to have its present tables."""
