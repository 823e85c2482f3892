"""Stock clients against a served application: text, streams, structured output and tools."""
