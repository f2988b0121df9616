"""Pictures of runs, of comparisons and of data: a module for each, and what they share."""
