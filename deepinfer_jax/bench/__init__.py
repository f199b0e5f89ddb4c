"""Benchmarks: each runs as a module and prints its figures with what they are measured against."""
