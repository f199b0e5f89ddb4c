"""Weights on disk: safetensors files, the inventory they must meet, and loading them."""

from deepinfer_jax.checkpoint.digest import tree_digest
from deepinfer_jax.checkpoint.engram import EngramTable
from deepinfer_jax.checkpoint.export import encode, export
from deepinfer_jax.checkpoint.inventory import component_sizes, inventory, stored_inventory
from deepinfer_jax.checkpoint.load import Loaded, load, memory_need
from deepinfer_jax.checkpoint.match import match
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint

__all__ = [
    "EngramTable", "Loaded", "component_sizes", "encode", "export", "inventory", "load", "match",
    "memory_need", "open_checkpoint", "stored_inventory", "tree_digest", "write_safetensors",
]  # fmt: skip
