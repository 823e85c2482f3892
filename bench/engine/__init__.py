"""The engine and the model in one process: models of real shapes, engines over them, and what their steps cost."""
