"""The compiled functions of training: one step, one evaluation, data-parallel over a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.forward import ForwardOptions
from deepinfer_jax.training.losses import objective, options_for, run_forward, targets
from deepinfer_jax.training.optimizer import TrainState, update
from deepinfer_jax.training.settings import TrainingSettings

AXIS = "data"
SKILL_SLOTS = 32
SCALARS = (
    "answer",
    "index",
    "z",
    "norm",
    "rate",
    "skipped",
    "peak",
    "index_peak",
    "imbalance",
    "tokens",
)
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Kind:
    """Which compiled function a step needs: rows, columns, first decoder column, rounding."""

    rows: int
    columns: int
    decoder_start: int
    quantize: bool

    @property
    def name(self) -> str:
        """For logs."""
        return ("long" if self.decoder_start else "short") + ("-qat" if self.quantize else "")


def data_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of one axis over which batches are split."""
    return Mesh(np.array(devices), (AXIS,))


def batch_shapes(kind: Kind, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract batch of `kind.rows` rows, split over the mesh."""
    sharding = NamedSharding(mesh, P(AXIS))
    shape = (kind.rows, kind.columns)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (
            ("ids", jnp.int32),
            ("segment", jnp.int32),
            ("skill", jnp.int32),
            ("weight", jnp.float32),
        )
    }


def _options(kind: Kind, settings: TrainingSettings, mesh: Mesh) -> ForwardOptions:
    gpu = mesh.devices.flat[0].platform == "gpu"
    return options_for(
        settings,
        bfloat16=gpu,
        kernel=gpu,
        decoder_start=kind.decoder_start,
        quantize=kind.quantize,
    )


def train_step(
    config: ModelConfig,
    settings: TrainingSettings,
    token_map: np.ndarray,
    mesh: Mesh,
    kind: Kind,
) -> jax.stages.Wrapped:
    """The jitted step; it donates its state.

    The report is float32 [10 + 2 * 32]: `SCALARS`, then right tokens and counted tokens per skill
    slot. On a GPU products run in bfloat16 and mHC in its kernel, elsewhere all is float32.
    """
    options = _options(kind, settings, mesh)
    sparse_step = settings.sparse_from * settings.steps

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        totals = {
            "weight": jnp.maximum(jnp.sum(batch["weight"]), 1e-6),
            "rows": jnp.sum(batch["segment"][:, options.decoder_start :] > 0, dtype=jnp.float32),
        }
        totals = jax.lax.psum(totals, AXIS)
        totals["rows"] = jnp.maximum(totals["rows"], 1.0)
        sparse = state.step.astype(jnp.float32) >= sparse_step
        (_, report), gradients = jax.value_and_grad(objective, has_aux=True)(
            state.weights, batch, totals, config, settings, options, token_map, sparse
        )
        gradients = jax.lax.psum(gradients, AXIS)
        peak = jax.lax.pmax(report["peak"], AXIS)
        load = jax.lax.psum(report["load"], AXIS)
        state, moved = update(state, gradients, peak, load, config, settings)
        right, counted = _by_skill(batch, report["correct"], options.decoder_start)
        sums = jax.lax.psum(
            {k: report[k] for k in ("answer", "index", "z")}
            | {"right": right, "counted": counted}
            | {"tokens": jnp.sum(batch["segment"] > 0, dtype=jnp.float32)},
            AXIS,
        )
        scalars = sums | moved
        scalars["peak"] = jnp.max(peak)
        scalars["index_peak"] = jax.lax.pmax(report["index_peak"], AXIS)
        scalars["imbalance"] = jnp.max(load / jnp.mean(load, axis=-1, keepdims=True))
        packed = jnp.stack([scalars[name] for name in SCALARS])
        return state, jnp.concatenate([packed, sums["right"], sums["counted"]])

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def evaluation(
    config: ModelConfig, settings: TrainingSettings, token_map: np.ndarray, mesh: Mesh, kind: Kind
) -> jax.stages.Wrapped:
    """The jitted check: bool [rows, r], whether the arg-max is the next token; always sparse.

    r = columns - decoder_start. A teacher-forced arg-max that is right over a whole answer equals
    greedy decoding of exactly that answer.
    """
    options = _options(kind, settings, mesh)

    def check(weights: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        result = run_forward(weights, batch, config, options, token_map, True)
        best = jnp.argmax(result.logits, axis=-1).astype(jnp.int32)
        return best == targets(batch["ids"], options.decoder_start)

    mapped = jax.shard_map(
        check, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped)


def _by_skill(batch: Batch, correct: jax.Array, decoder_start: int) -> tuple[jax.Array, jax.Array]:
    """Right and counted target tokens per skill slot, float32 [32]."""
    skill = batch["skill"][:, decoder_start:]
    target = batch["weight"][:, decoder_start:] > 0
    slots = jnp.arange(SKILL_SLOTS, dtype=jnp.int32)
    here = (skill[..., None] == slots) & target[..., None]
    right = jnp.sum(here & correct[..., None], axis=(0, 1), dtype=jnp.float32)
    return right, jnp.sum(here, axis=(0, 1), dtype=jnp.float32)
