"""A training loop whose generation workers come and go."""
