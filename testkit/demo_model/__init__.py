"""Training of the bundled demo model, whose weights lie in `replicas/demo`: `python -m testkit.demo_model.train`."""
