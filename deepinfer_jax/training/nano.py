"""Training of the shipped model: `python -m deepinfer_jax.training.nano --output FOLDER`.

A run is cut into pieces of a few minutes; `--resume FOLDER` continues where a piece stopped, with
bfloat16 weights and a freshly warmed optimiser. FOLDER may also be a model folder; `--at STEP` then
says where in the schedule its weights stand. `--resume FOLDER --evaluate` trains nothing and says
what rounding to the release formats costs.
"""

import argparse
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills.families import SKILLS
from deepinfer_jax.skills.mixture import SHARES
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training import carry, curve, rounding
from deepinfer_jax.training.batches import Shape, Source, synthetic
from deepinfer_jax.training.benchmark import benchmark
from deepinfer_jax.training.evaluate import (
    HeldOut,
    held_out_long,
    held_out_short,
)
from deepinfer_jax.training.nano_data import (
    DECODER_ROWS,
    LONG_SHAPE,
    NANO,
    SHORT_SHAPE,
    Producer,
)
from deepinfer_jax.training.piece import LOG, Plan, run
from deepinfer_jax.training.settings import TrainingSettings, override
from deepinfer_jax.training.smoke import smoke_config, smoke_plan, smoke_settings
from deepinfer_jax.training.steps import data_mesh

_SHORT = Shape(*SHORT_SHAPE, SHORT_SHAPE[1])
_LONG = Shape(*LONG_SHAPE, DECODER_ROWS)


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
    config = ModelConfig.from_file(NANO)
    tokenizer = Tokenizer.from_folder(NANO, config)
    token_map = compressed_token_map(tokenizer)
    check_compressed_map(token_map, config)
    held_out = _held_out(tokenizer, settings, len(devices)) if judged else {}
    return Plan(
        config,
        settings,
        token_map,
        source,
        _SHORT,
        _LONG,
        data_mesh(list(devices)),
        held_out,
        SKILLS,
        compiler or {},
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the nano model.")
    parser.add_argument("--output", type=Path, help="folder for weights, state, curve")
    parser.add_argument(
        "--resume", type=Path, help="folder that the piece before wrote, or a model folder"
    )
    parser.add_argument("--at", type=int, metavar="STEP", help="where a model folder stands")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece, compiling too")
    parser.add_argument("--steps", type=int, help="of the whole run, over all pieces")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a training setting"
    )
    parser.add_argument(
        "--xla",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="a compiler option",
    )
    parser.add_argument("--workers", type=int, default=8, help="processes that make batches")
    parser.add_argument("--devices", type=int, help="use the first so many devices")
    parser.add_argument("--synthetic", action="store_true", help="counting sequences, no text")
    parser.add_argument("--smoke", action="store_true", help="a tiny network for a few seconds")
    parser.add_argument(
        "--evaluate", action="store_true", help="say what the release formats cost --resume's run"
    )
    parser.add_argument("--benchmark", action="store_true", help="time the steps and stop")
    parser.add_argument("--profile", action="store_true", help="with --benchmark: list kernels")
    parser.add_argument("--only", action="append", default=[], help="with --benchmark: a step kind")
    given = parser.parse_args(argv)
    if problem := _problem(given):
        parser.error(problem)
    return given


def _problem(given: argparse.Namespace) -> str | None:
    """Why the options cannot be used together, or None."""
    if given.benchmark and (given.smoke or given.evaluate):
        other = "--smoke" if given.smoke else "--evaluate"
        return (
            f"--benchmark and {other} were given together. --benchmark times the training steps of "
            f"nano and does nothing else. Leave one of them out."
        )
    if (given.profile or given.only) and not given.benchmark:
        return (
            "--profile or --only was given without --benchmark. They say what a benchmark reports. "
            "Add --benchmark, or leave them out."
        )
    if given.evaluate and given.resume is None:
        return (
            "--evaluate was given without --resume. It judges weights that are already trained. "
            "Add --resume FOLDER."
        )
    if given.output is None and not (given.benchmark or given.evaluate):
        return (
            "--output is missing. Training writes weights, state and curve into a folder. "
            "Add --output FOLDER; only --benchmark and --evaluate need none."
        )
    is_model = given.resume is not None and carry.is_model(given.resume)
    if is_model and given.at is None and not given.evaluate:
        return (
            f"--resume names the model folder {given.resume}, and --at is missing. "
            f"Unlike a run's folder it does not say where in the schedule its weights stand. "
            f"Add --at STEP."
        )
    if given.at is not None and not is_model:
        return (
            f"--at {given.at} was given, and --resume names no model folder. "
            f"A run's folder says itself where it stands, and a new run starts at step 0. "
            f"Leave --at out, or resume from a folder of config.json and model.safetensors."
        )
    return None


def _start(given: argparse.Namespace, config: ModelConfig) -> carry.Carried | None:
    """What `--resume` names, or None."""
    if given.resume is None:
        return None
    if carry.is_model(given.resume):
        return carry.from_model(given.resume, config, given.at or 0)
    return carry.load(given.resume, config)


def _settings(given: argparse.Namespace, start: carry.Carried | None) -> TrainingSettings:
    """Defaults, then those of the resumed run, then the command line."""
    settings = smoke_settings() if given.smoke else TrainingSettings()
    if start is not None:
        settings = dataclasses.replace(settings, **start.settings)
    if given.steps is not None:
        settings = dataclasses.replace(settings, steps=given.steps)
    settings = override(settings, given.set)
    if given.at is not None and not 0 <= given.at < settings.steps:
        raise ConfigError(
            f"--at {given.at} is not among the steps 0..{settings.steps - 1} of the run.",
            "The schedule of rate, difficulty and rounding follows from the step.",
            "Correct --at, or give more --steps.",
        )
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    """The command; its progress and tables go to the standard error stream."""
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = _arguments(argv)
    config = smoke_config() if given.smoke else ModelConfig.from_file(NANO)
    start = _start(given, config)
    settings, compiler = _settings(given, start), dict(given.xla)

    def plan_of(source: Source, *, judged: bool) -> Plan:
        devices = jax.devices()[: given.devices]
        if given.smoke:
            return smoke_plan(devices, settings, compiler)
        return nano_plan(settings, source, devices, judged=judged, compiler=compiler)

    def train(plan: Plan) -> None:
        rows = [] if given.resume is None else curve.read(given.resume)
        run(plan, given.output, given.minutes, began, start, rows)

    counting = synthetic(config, _SHORT, _LONG)
    if given.evaluate:
        assert start is not None
        for line in rounding.table(rounding.compare(plan_of(counting, judged=True), start)):
            LOG.info(line)
    elif given.benchmark:
        benchmark(plan_of(counting, judged=False), given.only, profile=given.profile)
    elif given.smoke or given.synthetic:
        train(plan_of(counting, judged=False))
    else:
        parts = SHARES | {"sum_direct": settings.sum_direct}
        # Worker processes start before JAX touches an accelerator.
        with Producer(workers=given.workers, parts=parts) as producer:
            train(plan_of(producer.batches, judged=True))


if __name__ == "__main__":
    main()
