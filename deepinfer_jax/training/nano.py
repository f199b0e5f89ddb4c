"""Training of the shipped model: `python -m deepinfer_jax.training.nano --output FOLDER`.

A run is cut into pieces of a few minutes; `--resume FOLDER` continues where a piece stopped, with
bfloat16 weights and a freshly warmed optimiser.
"""

import argparse
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.skills.families import SKILLS
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training import carry
from deepinfer_jax.training.batches import Shape, Source, synthetic
from deepinfer_jax.training.benchmark import benchmark
from deepinfer_jax.training.engram import hash_tables
from deepinfer_jax.training.evaluate import (
    HeldOut,
    held_out_long,
    held_out_of,
    held_out_short,
)
from deepinfer_jax.training.nano_data import (
    DECODER_ROWS,
    LONG_SHAPE,
    SHORT_SHAPE,
    Producer,
    Request,
)
from deepinfer_jax.training.piece import Plan, run
from deepinfer_jax.training.settings import TrainingSettings, override
from deepinfer_jax.training.steps import data_mesh

_NANO = Path(__file__).parent.parent / "models" / "nano"
_SHORT = Shape(*SHORT_SHAPE, SHORT_SHAPE[1])
_LONG = Shape(*LONG_SHAPE, DECODER_ROWS)


def smoke_config() -> ModelConfig:
    """A network of two layers with every mechanism but re-indexing, for a run of seconds."""
    return dataclasses.replace(
        ModelConfig.from_file(_NANO),
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
        compress_ratios=(2, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
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


def smoke_plan(devices: Sequence[Any]) -> Plan:
    """A run of seconds on a CPU over counting sequences.

    Short steps with all entries, short steps with a selection, then long steps with rounding.
    """
    config = smoke_config()
    short, long = Shape(4, 64, 64), Shape(2, 64, 32)
    source = synthetic(config, short, long)
    settings = TrainingSettings(
        steps=40,
        lr=1e-2,
        warmup=5,
        rewarm=2,
        long_from=0.9,
        long_every=1,
        qat_from=0.9,
        log_every=10,
        eval_every=30,
        chunk=0,
        long_chunk=0,
    )
    mesh = data_mesh(list(devices))
    unseen = next(iter(source([Request("short", settings.seed + 1, 0, 1.0)])))
    judged = held_out_of([unseen] * len(devices), 0, ("count",))
    return Plan(
        config,
        settings,
        hash_tables(config, np.arange(config.vocab_size)),
        source,
        short,
        long,
        mesh,
        {"short": judged},
        ("count",),
        {"xla_backend_optimization_level": 0},  # compiling is most of the time here
    )


def _held_out(tokenizer: Tokenizer, settings: TrainingSettings, devices: int) -> dict[str, HeldOut]:
    batches = settings.eval_batches
    return {
        "short": held_out_short(tokenizer, batches * devices * _SHORT.rows, _SHORT.columns),
        "long": held_out_long(
            tokenizer, batches * devices * _LONG.rows, _LONG.columns, _LONG.decoder_rows
        ),
    }


def nano_plan(
    settings: TrainingSettings,
    source: Source,
    devices: Sequence[Any],
    *,
    judged: bool,
    compiler: Mapping[str, str] | None = None,
) -> Plan:
    """The run that makes the shipped model; `judged` prepares the held-out sets."""
    config = ModelConfig.from_file(_NANO)
    tokenizer = Tokenizer.from_folder(_NANO, config)
    token_map = compressed_token_map(tokenizer)
    check_compressed_map(token_map, config)
    held_out = _held_out(tokenizer, settings, len(devices)) if judged else {}
    return Plan(
        config,
        settings,
        hash_tables(config, token_map),
        source,
        _SHORT,
        _LONG,
        data_mesh(list(devices)),
        held_out,
        SKILLS,
        compiler or {},
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the nano model.")
    parser.add_argument("--output", type=Path, help="folder for weights, state, curve")
    parser.add_argument("--resume", type=Path, help="folder that the piece before wrote")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece, compiling too")
    parser.add_argument("--steps", type=int, help="of the whole run, over all pieces")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a training setting"
    )
    parser.add_argument(
        "--xla", action="append", default=[], metavar="NAME=VALUE", help="a compiler option"
    )
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches")
    parser.add_argument("--devices", type=int, help="use the first so many devices")
    parser.add_argument("--synthetic", action="store_true", help="counting sequences, no text")
    parser.add_argument("--smoke", action="store_true", help="a tiny network for a few seconds")
    parser.add_argument("--benchmark", action="store_true", help="time the steps and stop")
    parser.add_argument("--profile", action="store_true", help="with --benchmark: list kernels")
    parser.add_argument("--only", action="append", default=[], help="with --benchmark: a step kind")
    given = parser.parse_args(argv)
    if given.output is None and not given.benchmark:
        parser.error("--output FOLDER is needed, unless --benchmark is given")
    return given


def _settings(given: argparse.Namespace) -> TrainingSettings:
    """Defaults, then those of the resumed run, then the command line."""
    settings = TrainingSettings()
    if given.resume is not None:
        settings = TrainingSettings(
            **carry.load(given.resume, ModelConfig.from_file(_NANO)).settings
        )
    if given.steps is not None:
        settings = dataclasses.replace(settings, steps=given.steps)
    return override(settings, given.set)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; its progress goes to the standard error stream."""
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = _arguments(argv)
    if given.smoke:
        plan = smoke_plan(jax.devices()[: given.devices])
        run(plan, given.output, given.minutes, given.resume, began)
        return
    settings = _settings(given)
    compiler = dict(text.split("=", 1) for text in given.xla)
    if given.synthetic or given.benchmark:
        devices = jax.devices()[: given.devices]
        source = synthetic(ModelConfig.from_file(_NANO), _SHORT, _LONG)
        plan = nano_plan(settings, source, devices, judged=False, compiler=compiler)
        if given.benchmark:
            benchmark(plan, given.only, profile=given.profile)
        else:
            run(plan, given.output, given.minutes, given.resume, began)
        return
    # Worker processes start before JAX touches an accelerator.
    with Producer(workers=given.workers) as producer:
        plan = nano_plan(settings, producer.batches, jax.devices()[: given.devices], judged=True)
        run(plan, given.output, given.minutes, given.resume, began)


if __name__ == "__main__":
    main()
