"""The mixture layer: router without an auxiliary loss, routed experts, one shared expert."""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import up_to_last
from deepinfer_jax.model.params import Moe
from deepinfer_jax.ops.experts import expert
from deepinfer_jax.ops.table import Ops

_SUM_EPS = 1e-20


@flax.struct.dataclass
class Route:
    """Chosen experts of every row: ids int32 [n, k] by falling score, gates float32 [n, k]."""

    ids: jax.Array
    gates: jax.Array


def route(x: jax.Array, params: Moe, is_image: jax.Array, config: ModelConfig, ops: Ops) -> Route:
    """The k experts of each row x [n, d]; the bias chooses but does not weigh.

    Image rows choose with `bias_vl` where there is one; equal scores take the lower expert (model
    specification, "MoE").
    """
    logits = ops.linear(x.astype(jnp.float32), params.gate)
    scores = jnp.sqrt(jax.nn.softplus(logits / config.gate_temp))
    bias = params.bias
    if params.bias_vl is not None:
        bias = jnp.where(is_image[:, None], params.bias_vl, bias)
    _, ids = jax.lax.top_k(scores + bias, config.num_experts_per_tok)
    gates = jnp.take_along_axis(scores, ids, -1)
    gates = config.routed_scaling_factor * gates / (gates.sum(-1, keepdims=True) + _SUM_EPS)
    return Route(ids.astype(jnp.int32), gates)


def moe(
    x: jax.Array,
    params: Moe,
    is_image: jax.Array,
    real: jax.Array,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> tuple[jax.Array, Route]:
    """Routed plus shared experts on x [n, d], summed in float32, in x's dtype.

    Rows that are not `real` bool [n] are padding, which no routed expert takes.
    """
    common = {
        "linear": ops.linear,
        "limit": config.swiglu_limit,
        "quantize": arithmetic.quantize_inputs,
    }

    def own(x: jax.Array, is_image: jax.Array) -> tuple[Route, jax.Array]:
        return route(x, params, is_image, config, ops), expert(x, params.shared, None, **common)

    chosen, shared = ops.rowwise(lambda rows: own(*rows), (x, is_image), up_to_last(real))
    ids = jnp.where(real[:, None], chosen.ids, config.n_routed_experts)
    routed = ops.experts(x, params.experts, ids, chosen.gates, **common)
    return (routed + shared).astype(x.dtype), chosen
