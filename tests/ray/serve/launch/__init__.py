"""The private cluster of `make serve`: its ports, its profiles and its neighbours."""
