"""Time and memory on the host: which sequence runs when, and what it has produced."""
