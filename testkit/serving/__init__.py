"""Applications on Ray in processes of their own."""
