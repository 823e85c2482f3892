"""Pictures for the documents."""
