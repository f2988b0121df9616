"""What can be set, as one object."""
