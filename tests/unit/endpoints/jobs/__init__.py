"""Jobs, batches and files over HTTP."""
