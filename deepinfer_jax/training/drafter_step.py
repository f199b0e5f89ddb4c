"""One step of a drafter's training: the frozen target's word on a batch, the loss, the update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.inventory import TensorSpec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.drafter_blocks import (
    Targets,
    choose_anchors,
    make_blocks,
    rows_at,
    trained_tokens,
)
from deepinfer_jax.training.drafter_forward import DrafterOptions, draft_forward
from deepinfer_jax.training.drafter_losses import (
    DFLASH,
    DSPARK,
    LossWeights,
    block_loss,
    metric_sums,
)
from deepinfer_jax.training.eagle3 import eagle3_initial_values, eagle3_objective, eagle3_specs
from deepinfer_jax.training.engram import table_rows
from deepinfer_jax.training.forward import ForwardOptions, forward
from deepinfer_jax.training.linear import project
from deepinfer_jax.training.parameters import initial_values, specs
from deepinfer_jax.training.quantize import round_tensors

Method = Literal["dspark", "dflash", "eagle3"]
Weights = Mapping[str, jax.Array]
Report = dict[str, jax.Array]
_HEADS = (".markov_head.", ".confidence_head.")


@dataclass(frozen=True)
class DrafterSettings:
    """Numbers of a drafter's run; the defaults train nano's drafter on one H200.

    Attributes:
        steps: of the whole run. seed: of weights, batches and anchors.
        lr: peak rate. warmup: share of the steps in which it rises; then a cosine to 0.
        b1, b2, eps: Adam. clip: largest global gradient norm.
        anchors: blocks a row. decay: slot k weighs exp(-k / decay).
        bias_rate: step of the router biases towards equal load.
        long_every: every so many steps takes long rows; 0 never does.
        log_every, save_every: steps.
    """

    steps: int = 8_000
    seed: int = 42
    lr: float = 6e-4
    warmup: float = 0.04
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    anchors: int = 128
    decay: float = 4.0
    bias_rate: float = 1e-3
    long_every: int = 4
    log_every: int = 50
    save_every: int = 1_000

    def is_long(self, step: int) -> bool:
        """Whether this step takes long rows."""
        return self.long_every > 0 and step % self.long_every == self.long_every - 1


@flax.struct.dataclass
class DrafterState:
    """What a step carries.

    Attributes:
        weights: float32 masters by training name. m, v: Adam's moments of each, float32.
        step: int32, updates so far.
    """

    weights: dict[str, jax.Array]
    m: dict[str, jax.Array]
    v: dict[str, jax.Array]
    step: jax.Array


def drafter_specs(method: Method, config: ModelConfig) -> dict[str, TensorSpec]:
    """Storage kind of every trained tensor, by training name; shapes are per expert."""
    if method == "eagle3":
        return eagle3_specs(config)
    every = specs(config, drafter=True)
    heads = method == "dspark"
    return {n: s for n, s in every.items() if heads or not any(h in n for h in _HEADS)}


def initial_weights(method: Method, config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """float32 masters by training name, before the first step."""
    if method == "eagle3":
        return eagle3_initial_values(config, seed)
    values = initial_values(config, seed, drafter=True)
    return {name: values[name] for name in drafter_specs(method, config)}


def learning_rate(settings: DrafterSettings, step: jax.Array) -> jax.Array:
    """float32 rate of int32 `step`: (s + 1) / w of the peak for w warm-up steps, then a cosine."""
    warm = max(round(settings.warmup * settings.steps), 1)
    n = step.astype(jnp.float32)
    turn = jnp.clip((n - warm) / max(settings.steps - warm, 1), 0.0, 1.0)
    falling = 0.5 * (1.0 + jnp.cos(jnp.pi * turn))
    return settings.lr * jnp.where(n < warm, (n + 1.0) / warm, falling)


def begin(method: Method, config: ModelConfig, settings: DrafterSettings) -> DrafterState:
    """The state before the first step."""
    values = initial_weights(method, config, settings.seed)
    weights = {name: jnp.asarray(value) for name, value in values.items()}
    m, v = ({name: jnp.zeros_like(w) for name, w in weights.items()} for _ in "mv")
    return DrafterState(weights, m, v, jnp.zeros((), jnp.int32))


def teach(
    target: Weights,
    batch: Mapping[str, jax.Array],
    config: ModelConfig,
    options: ForwardOptions,
    token_map: np.ndarray,
) -> Targets:
    """What the frozen target says about a batch, from column `options.decoder_start`.

    Args:
        target: float32 weights of the backbone, as stored: no further rounding is done.
        batch: ids, segment int32 and weight float32, [b, t].
        config, options: of the target's forward. token_map: int32 [vocab].
    """
    start = options.decoder_start
    hashes = table_rows(token_map, batch["ids"], batch["segment"], config)
    result = forward(target, batch["ids"], batch["segment"], hashes, config, options)
    assert result.taps is not None
    mask = trained_tokens(batch["weight"])
    told = Targets(
        ids=batch["ids"][:, start:],
        segment=batch["segment"][:, start:],
        mask=mask[:, start:],
        taps=result.taps,
        hidden=result.hidden,
    )
    return jax.lax.stop_gradient(told)


def objective(
    weights: Weights,
    frozen: Weights,
    targets: Targets,
    key: jax.Array,
    method: Method,
    config: ModelConfig,
    options: DrafterOptions,
    settings: DrafterSettings,
) -> tuple[jax.Array, Report]:
    """The loss of a batch and what a log line needs: parts, metric sums, `load`.

    Args:
        weights: float32 masters of the drafter; with `options.quantize` they are rounded to the
            release's formats first, with straight-through gradients.
        frozen: the target's `embed.weight` and `head.weight`, float32.
        targets: the batch. key: of the anchors. method, config, options, settings: the run.
    """
    if options.quantize:
        weights = round_tensors(weights, drafter_specs(method, config))
    size = config.dspark_block_size
    if method == "eagle3":
        return eagle3_objective(weights, frozen, targets, config, options, size)
    anchors, keep = choose_anchors(key, targets.mask, targets.segment, settings.anchors)
    blocks = make_blocks(
        targets.ids,
        targets.segment,
        targets.mask,
        anchors,
        keep,
        size=size,
        noise=config.dspark_noise_token_id,
    )
    drafted = draft_forward(weights, frozen, targets.taps, targets.segment, blocks, config, options)
    # Target logits exist at the slots alone: whole rows of them would be the largest array here.
    told = rows_at(targets.hidden, blocks.places)
    told = told.reshape(*blocks.places.shape, -1)
    target_logits = project(told, frozen["head.weight"], jnp.float32)
    base = DSPARK if options.heads else DFLASH
    loss, parts = block_loss(
        drafted.logits,
        target_logits,
        drafted.confidence,
        blocks.labels,
        blocks.valid,
        LossWeights(base.ce, base.tv, base.confidence, settings.decay),
    )
    accepted = parts.pop("acceptance")
    sums = metric_sums(accepted, drafted.confidence, blocks.valid)
    return loss, {"loss": loss, "load": drafted.load} | parts | sums


def update(
    state: DrafterState, gradients: Weights, load: jax.Array, settings: DrafterSettings
) -> tuple[DrafterState, Report]:
    """One step of Adam behind a clip of the global norm, and the router biases moved by sign.

    There is no weight decay, so this is also AdamW. A bias gets no gradient; it moves towards equal
    load. load: float32 [stages, experts], one row per router.
    """
    s = settings
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients.values()))
    factor = jnp.minimum(1.0, s.clip / jnp.maximum(norm, 1e-12))
    rate = learning_rate(s, state.step)
    count = (state.step + 1).astype(jnp.float32)
    m_scale, v_scale = 1.0 / (1.0 - s.b1**count), 1.0 / (1.0 - s.b2**count)
    weights, m, v = {}, {}, {}
    for name, old in state.weights.items():
        g = gradients[name] * factor
        m[name] = s.b1 * state.m[name] + (1.0 - s.b1) * g
        v[name] = s.b2 * state.v[name] + (1.0 - s.b2) * jnp.square(g)
        move = m[name] * m_scale / (jnp.sqrt(v[name] * v_scale) + s.eps)
        weights[name] = old - rate * move
    short = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    # By stage: a longer name has a longer number.
    routers = sorted((n for n in weights if n.endswith(".gate.bias")), key=lambda n: (len(n), n))
    for name, direction in zip(routers, short, strict=True):
        weights[name] = weights[name] + s.bias_rate * direction
    return DrafterState(weights, m, v, state.step + 1), {"norm": norm, "rate": rate}


def train_step(
    method: Method,
    config: ModelConfig,
    settings: DrafterSettings,
    options: DrafterOptions,
    targets_of: Callable[[Weights, Mapping[str, jax.Array]], Targets],
) -> jax.stages.Wrapped:
    """The jitted step (state, target weights, batch) -> (state, report); it donates its state.

    `targets_of` turns a batch into the target's word on it: the target's forward, or what a cache
    holds. A step depends on the state, the batch and the settings alone.
    """

    def step(
        state: DrafterState, target: Weights, batch: Mapping[str, jax.Array]
    ) -> tuple[DrafterState, Report]:
        targets = targets_of(target, batch)
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
        (_, report), gradients = jax.value_and_grad(objective, has_aux=True)(
            state.weights, target, targets, key, method, config, options, settings
        )
        state, more = update(state, gradients, report["load"], settings)
        load = report.pop("load")
        imbalance = jnp.mean(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1.0))
        return state, report | more | {"imbalance": imbalance}

    return jax.jit(step, donate_argnums=(0,))
