"""What operators see of a served application: Prometheus and Ray's dashboard."""
