"""Measures how a CPU wants weights fetched: the rows of native/core/prefetch.cc."""
