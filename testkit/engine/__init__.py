"""Model runners without a model: one checks every read of the KV cache, one takes the time of a real device."""
