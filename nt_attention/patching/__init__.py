"""Makes existing models padding-free, and undoes that."""
