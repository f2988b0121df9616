"""A client's work: the model as one vector, its objective, evaluation, a dry run."""
