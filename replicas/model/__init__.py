"""One model on one device: loading, the paged KV cache, attention over it, sampling, decoding to text."""
