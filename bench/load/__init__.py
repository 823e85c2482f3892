"""An open-loop load generator: every request leaves at its scheduled time, also when earlier ones are still open."""
