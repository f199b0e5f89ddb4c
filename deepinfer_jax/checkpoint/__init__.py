"""Weights on disk: safetensors files, the inventory they must meet, and loading them."""
