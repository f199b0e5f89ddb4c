"""The engine as a model of evaluation harnesses."""
