"""An open-loop load generator: requests leave at their appointed time, whatever the server does."""
