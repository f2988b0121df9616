"""Who takes part in a round, with which weight and rate, and what is recorded of it."""
