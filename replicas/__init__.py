"""One model on one device: the engine, the model code, and the replica that wraps them."""
