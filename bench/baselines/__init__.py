"""The classic ways to batch requests, as policies over our own engine, beside continuous batching."""
