"""Ways to run a federation: so far inside one process."""
