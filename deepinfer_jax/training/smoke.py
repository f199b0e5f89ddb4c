"""A training run of seconds on a CPU: a tiny network that learns to count."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.batches import Shape, synthetic
from deepinfer_jax.training.evaluate import held_out_of
from deepinfer_jax.training.nano_data import NANO, Request
from deepinfer_jax.training.piece import Plan
from deepinfer_jax.training.settings import TrainingSettings
from deepinfer_jax.training.steps import data_mesh


def smoke_config() -> ModelConfig:
    """A window layer, then a compressed one with index and Engram, for a run of seconds."""
    return dataclasses.replace(
        ModelConfig.from_file(NANO),
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        n_routed_experts=4,
        sliding_window=16,
        compress_ratios=(0, 2),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        index_n_heads=2,
        index_topk=8,
        candidate_source_layer_id=None,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        engram_layer_ids=(1,),
        engram_num_embeddings=(630,),
        engram_vocab_size=97,
        engram_compressed_vocab_size=64,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


def smoke_settings() -> TrainingSettings:
    """Long steps with rounding, first over all entries, then over a selection.

    It is one kind of step, the one with the most in it, as compiling is nearly all of the time.
    """
    return TrainingSettings(
        steps=40,
        lr=1e-2,
        warmup=5,
        rewarm=2,
        long_from=0,
        long_every=1,
        qat_from=0,
        log_every=10,
        eval_every=30,
        chunk=0,
        long_chunk=0,
    )


def smoke_plan(
    devices: Sequence[Any],
    settings: TrainingSettings | None = None,
    compiler: Mapping[str, str] | None = None,
) -> Plan:
    """A run of seconds on a CPU over counting sequences; `smoke_settings` when none are given."""
    config, settings = smoke_config(), settings or smoke_settings()
    short, long = Shape(4, 64, 64), Shape(4, 64, 32)
    source = synthetic(config, short, long)
    mesh = data_mesh(list(devices))
    unseen = next(iter(source([Request("long", settings.seed + 1, 0, 1.0)])))
    judged = held_out_of([unseen] * len(devices), long.columns - long.decoder_rows, ("count",))
    fast = {"xla_backend_optimization_level": 0}
    return Plan(
        config,
        settings,
        np.arange(config.vocab_size, dtype=np.int32),
        source,
        short,
        long,
        mesh,
        {"long": judged},
        ("count",),
        fast | dict(compiler or {}),
    )
