"""@NAME@, a backend for ktk."""
