"""Deployments: their numbers of replicas, their versions and their ports."""
