"""Master weights in training: names, shapes, initial values, and the way from and to a checkpoint.

A flat mapping from release tensor names to float32 arrays. The routed experts of a layer are
stacked: `layers.{l}.ffn.experts.w1.weight` is [e, f, d]. The backbone and the drafter (`mtp.*`) are
trained apart, so every function speaks of one of them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from deepinfer_jax.checkpoint.inventory import TensorSpec, inventory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError

_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123]\.weight)")
_STACKED = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(w[123]\.weight)")
_DRAFTER = "mtp."
_DIAGONAL = 4.0  # logit that keeps about 0.95 of a stream in place


def specs(config: ModelConfig, *, drafter: bool = False) -> dict[str, TensorSpec]:
    """Storage kind and types of every trained tensor, by training name; shapes are per expert.

    Those of the backbone, or with `drafter` the `mtp.*` ones alone. `gate.bias_vl` is not among
    them: it is made at export. Raises ConfigError when the config describes no drafter.
    """
    every = inventory(replace(config, vision=None), drafter=drafter)
    return {
        _stacked(n): spec
        for n, spec in every.items()
        if not n.endswith(".gate.bias_vl") and n.startswith(_DRAFTER) == drafter
    }


def shapes(config: ModelConfig, *, drafter: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every trained tensor, by training name."""
    experts = (config.dspark_n_routed_experts if drafter else config.n_routed_experts,)
    return {
        name: (*(experts if _STACKED.fullmatch(name) else ()), *spec.shape)
        for name, spec in specs(config, drafter=drafter).items()
    }


def initial_values(
    config: ModelConfig, seed: int, *, embed_std: float = 0.5, drafter: bool = False
) -> dict[str, np.ndarray]:
    """float32 masters: unit-size projections, small sublayer outputs, nearly static streams.

    A drafter's Markov bias starts at zero and its confidence at one half.
    """
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes(config, drafter=drafter).items():
        values[name] = _initial(name, shape, config, rng, embed_std).astype(np.float32)
    return values


def from_checkpoint(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, *, drafter: bool = False
) -> dict[str, np.ndarray]:
    """Masters from dequantized release tensors (any float dtype); other tensors are not read.

    Raises CheckpointError for a missing tensor or a wrong shape.
    """
    values = {}
    for name, shape in shapes(config, drafter=drafter).items():
        if match := _STACKED.fullmatch(name):
            parts = [f"{match[1]}.{e}.{match[2]}" for e in range(shape[0])]
            _require(parts, tensors)
            value = np.stack([np.asarray(tensors[p], np.float32) for p in parts])
        else:
            _require([name], tensors)
            value = np.asarray(tensors[name], np.float32)
        if value.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(value.shape)}; the config gives {list(shape)}.",
                "The weights belong to another network.",
                "Use the config that the checkpoint was trained with.",
            )
        values[name] = value
    return values


def to_checkpoint(
    values: Mapping[str, np.ndarray], config: ModelConfig, *, drafter: bool = False
) -> dict[str, np.ndarray]:
    """float32 tensors by release name: experts apart, `bias_vl` copied from `bias`."""
    tensors = {}
    for name in shapes(config, drafter=drafter):
        value = np.asarray(values[name], np.float32)
        if match := _STACKED.fullmatch(name):
            tensors |= {f"{match[1]}.{e}.{match[2]}": part for e, part in enumerate(value)}
        else:
            tensors[name] = value
            if name.endswith(".gate.bias"):
                tensors[f"{name}_vl"] = value.copy()
    return tensors


def _stacked(name: str) -> str:
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}.{match[3]}" if match else name


def _require(names: list[str], tensors: Mapping[str, np.ndarray]) -> None:
    missing = [n for n in names if n not in tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing, the first is {missing[0]}.",
            "Training continues only from a complete set of weights.",
            "Check the folder that is resumed from.",
        )


def _initial(
    name: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator, embed: float
) -> np.ndarray:
    if name.endswith(("norm.weight", ".q_weight", ".k_weight")):
        return np.ones(shape)
    zero = (".attn_sink", ".gate.bias", ".markov_head.head.weight", ".confidence_head.proj.weight")
    if name.endswith(zero):
        return np.zeros(shape)
    if name.endswith("_scale"):
        return np.full(shape, 0.1)
    if name.endswith("_base"):
        return _mix_base(name, config)
    std = 1 / math.sqrt(shape[-1])
    if name == "embed.weight":
        std = embed
    elif name == "head.weight":
        std *= 0.5
    elif name.endswith(".engram.embed.weight"):
        std = 0.1  # the key is normed, so this sets the size of the value alone
    elif name.endswith((".wo_b.weight", ".w2.weight")):
        std *= 0.5 / math.sqrt(config.num_hidden_layers) * 2 ** (".wo_b." in name)
    return rng.normal(0, std, shape)


def _mix_base(name: str, config: ModelConfig) -> np.ndarray:
    """Each sublayer reads and writes all streams, a different one a little more."""
    n = config.hc_mult
    sublayer = 2 * int(name.split(".")[1]) + ("hc_ffn" in name)
    favoured = np.arange(n) == sublayer % n
    pre = np.where(favoured, 1.0, -1.0)
    post = np.where(favoured, 0.0, -1.0)
    return np.concatenate([pre, post, (_DIAGONAL * np.eye(n)).ravel()])
