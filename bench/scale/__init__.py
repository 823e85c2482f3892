"""Experiments on scale: cost and quality of decisions over many replicas, ingresses and tenants."""
