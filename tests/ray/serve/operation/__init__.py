"""What operators do with a served application: deploy, update, scale, watch."""
