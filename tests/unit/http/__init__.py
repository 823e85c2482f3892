"""The HTTP application over fake replicas: every endpoint, the stock client, real connections."""
