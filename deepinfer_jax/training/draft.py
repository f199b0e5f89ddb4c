"""Training of drafters: `python -m deepinfer_jax.training.draft --method dspark --out FOLDER`.

The target is frozen. What it says about each batch is computed on the way, or read from a target
cache (`--target-cache`; `--write-target-cache` makes one). A piece ends after `--seconds`, and
`--resume` continues it bit for bit on the same kind of device where the compiled step itself
repeats its bits (a CPU does; the scatters and matrix products of a GPU promise nothing).

The batch for nano on one H200: 32 rows of 1,024 positions, or every fourth step 8 rows of 4,096 of
which the decoder layers see 512, as nano itself was trained; and 128 anchors a row. A row of packed
conversations has some 300 positions that may be anchors, so 128 take a good part of what the
target's forward has paid for, while the 4,096 blocks of five slots cost about a fifth of nano's own
training step: three stages for 20,480 slots against ten layers for 32,768 positions. The target's
forward alone is about a third of that step, which took 70 ms, so a step is estimated at 40 to 50 ms
and the 8,000 steps of the default at six minutes, with room for compiling.
"""

import argparse
import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training import carry, drafter_state
from deepinfer_jax.training.batches import Shape, Source, synthetic
from deepinfer_jax.training.drafter_piece import LOG, DrafterRun, train, write_cache
from deepinfer_jax.training.drafter_step import DrafterSettings, Method
from deepinfer_jax.training.nano_data import (
    DECODER_ROWS,
    LONG_SHAPE,
    NANO,
    SHORT_SHAPE,
    Producer,
)
from deepinfer_jax.training.parameters import initial_values
from deepinfer_jax.training.settings import override
from deepinfer_jax.training.smoke import smoke_config
from deepinfer_jax.training.target_cache import TargetCache


def smoke_drafter_config() -> ModelConfig:
    """The smoke network with a drafter of one stage and blocks of two."""
    return dataclasses.replace(
        smoke_config(),
        compress_ratios=(0, 2, 0),
        num_nextn_predict_layers=1,
        dspark_block_size=2,
        dspark_noise_token_id=3,
        dspark_target_layer_ids=(0, 1),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )


def smoke_run(
    method: Method, settings: DrafterSettings, cache: TargetCache | None = None
) -> DrafterRun:
    """A run of seconds on a CPU: an untrained tiny target over counting sequences."""
    config = smoke_drafter_config()
    short, long = Shape(4, 64, 64), Shape(4, 64, 32)
    return DrafterRun(
        method=method,
        config=config,
        settings=settings,
        target=initial_values(config, 0),
        token_map=np.arange(config.vocab_size, dtype=np.int32),
        source=synthetic(config, short, long),
        short=short,
        long=long,
        cache=cache,
        compiler={"xla_backend_optimization_level": 0},
    )


def smoke_settings() -> DrafterSettings:
    """For `smoke_run`; one kind of step, as compiling is nearly all of the time."""
    return DrafterSettings(
        steps=6, lr=3e-3, warmup=0.2, anchors=8, long_every=0, log_every=2, save_every=4
    )


def model_run(
    method: Method,
    settings: DrafterSettings,
    model: Path,
    source: Source | None,
    cache: TargetCache | None = None,
) -> DrafterRun:
    """A run for the model folder `model`, with nano's batches.

    Raises ConfigError or CheckpointError for a folder that does not load.
    """
    config = ModelConfig.from_file(model)
    token_map = compressed_token_map(Tokenizer.from_folder(model, config))
    check_compressed_map(token_map, config)
    return DrafterRun(
        method=method,
        config=config,
        settings=settings,
        target=carry.from_model(model, config, 0).weights,
        token_map=token_map,
        source=source,
        short=Shape(*SHORT_SHAPE, SHORT_SHAPE[1]),
        long=Shape(*LONG_SHAPE, DECODER_ROWS),
        cache=cache,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a drafter for a frozen target.")
    parser.add_argument("--method", choices=get_args(Method), required=True)
    parser.add_argument("--out", type=Path, help="folder for state, metrics and the drafter")
    parser.add_argument("--model", type=Path, default=NANO, help="the target's folder")
    parser.add_argument("--steps", type=int, help="of the whole run, over all pieces")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this piece")
    parser.add_argument("--until", type=int, metavar="STEP", help="end this piece at STEP")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the run"
    )
    parser.add_argument("--target-cache", type=Path, metavar="DIR", help="train from this cache")
    parser.add_argument(
        "--write-target-cache", type=Path, metavar="DIR", help="write a cache and stop"
    )
    parser.add_argument("--batches", type=int, default=100, help="of --write-target-cache")
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches")
    parser.add_argument("--smoke", action="store_true", help="a tiny network for a few seconds")
    given = parser.parse_args(argv)
    if problem := _problem(given):
        parser.error(problem)
    return given


def _problem(given: argparse.Namespace) -> str | None:
    """Why the options cannot be used together, or None."""
    if given.out is None and given.write_target_cache is None:
        return (
            "--out is missing. Training writes state, metrics and the drafter into a folder. "
            "Add --out FOLDER; only --write-target-cache needs none."
        )
    if given.write_target_cache is not None and (given.out or given.target_cache):
        other = "--out" if given.out else "--target-cache"
        return (
            f"--write-target-cache and {other} were given together. Writing a cache trains nothing "
            f"and reads none. Leave one of them out."
        )
    return None


def _settings(given: argparse.Namespace) -> DrafterSettings:
    """Defaults, then those of the resumed run, then the command line."""
    settings = smoke_settings() if given.smoke else DrafterSettings()
    if given.resume:
        settings = dataclasses.replace(settings, **drafter_state.read_header(given.out).settings)
    if given.steps is not None:
        settings = dataclasses.replace(settings, steps=given.steps)
    settings = override(settings, given.set)
    if settings.steps < 1 or settings.anchors < 1:
        raise ConfigError(
            f"The run has {settings.steps} steps and {settings.anchors} anchors a row.",
            "The schedule and the loss need at least one of each.",
            "Correct --steps, or --set anchors=COUNT.",
        )
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    """The command; its progress goes to the standard error stream."""
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = _arguments(argv)
    settings = _settings(given)
    cache = TargetCache(given.target_cache) if given.target_cache is not None else None

    def work(run: DrafterRun) -> None:
        if given.write_target_cache is not None:
            count = write_cache(run, given.write_target_cache, given.batches)
            LOG.info(f"{given.write_target_cache} holds {count} samples")
            return
        LOG.info(f"{run.method} on {jax.devices()[0].device_kind}: {settings}")
        train(
            run,
            given.out,
            seconds=given.seconds,
            began=began,
            resume=given.resume,
            until=given.until,
        )

    if given.smoke:
        work(smoke_run(given.method, settings, cache))
    elif cache is not None:
        work(model_run(given.method, settings, given.model, None, cache))
    else:
        # Worker processes start before JAX touches an accelerator.
        with Producer(given.model, workers=given.workers) as producer:
            work(model_run(given.method, settings, given.model, producer.batches))


if __name__ == "__main__":
    main()
