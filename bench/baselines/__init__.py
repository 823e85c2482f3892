"""Classic ways to batch requests, as policies over Headway's engine, compared with continuous batching."""
