"""A request's way to replicas that work, fail, hang or leave."""
