"""Classic ways to batch requests, as policies over Headway's engine, beside its own way and its latency target."""
