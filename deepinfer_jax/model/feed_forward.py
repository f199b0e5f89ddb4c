"""From the attention's output to the next layer: both hyper-connections and the mixture."""

from typing import NamedTuple

import jax

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import up_to_last
from deepinfer_jax.model.layers import rms_norm
from deepinfer_jax.model.moe import moe
from deepinfer_jax.model.params import HyperConnection, Layer
from deepinfer_jax.model.streams import Residual, collapse, expand_streams, stream_mean
from deepinfer_jax.ops.table import Ops


class FeedForwardOut(NamedTuple):
    """What leaves a layer.

    Attributes:
        residual: for the next layer.
        mean: [n, d], of the streams that entered the layer.
        trace: what a trace shows, by the names of the golden data.
    """

    residual: Residual
    mean: jax.Array
    trace: dict[str, jax.Array]


def feed_forward(
    streams: jax.Array,
    attn_out: jax.Array,
    params: Layer,
    is_image: jax.Array,
    real: jax.Array,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> FeedForwardOut:
    """The rest of a layer (model specification, "Layer with delayed pre-mix").

    Args:
        streams: [n, s, d], as they entered the layer.
        attn_out: [n, d].
        params: the layer's weights.
        is_image: bool [n].
        real: bool [n], rows that are not padding.
        config: its widths and experts.
        arithmetic: what is rounded.
        ops: the kernels.
    """
    used = up_to_last(real)

    def mixes(streams: jax.Array, hc: HyperConnection) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = config
        return ops.mhc(streams, hc.fn, hc.base, hc.scale, iters=c.hc_sinkhorn_iters, eps=c.hc_eps)

    def between(part: tuple[jax.Array, jax.Array]) -> tuple:
        streams, attn_out = part
        mean, (pre, post, comb) = stream_mean(streams), mixes(streams, params.hc_attn)
        streams = expand_streams(attn_out, post, comb, streams)
        ffn_in = rms_norm(collapse(Residual(streams, pre)), params.ffn_norm, config.rms_norm_eps)
        return mean, (pre, post, comb), streams, mixes(streams, params.hc_ffn), ffn_in

    with jax.named_scope("mixes"):
        mean, (pre, post, comb), streams, (next_pre, ffn_post, ffn_comb), ffn_in = ops.rowwise(
            between, (streams, attn_out), used
        )
    with jax.named_scope("moe"):
        ffn_out, chosen = moe(
            ffn_in, params.moe, is_image, real, config=config, arithmetic=arithmetic, ops=ops
        )
        grown = ffn_out, ffn_post, ffn_comb, streams
        streams = ops.rowwise(lambda part: expand_streams(*part), grown, used)
    trace = {
        "attn_pre": pre,
        "attn_post": post,
        "attn_comb": comb,
        "route_idx": chosen.ids,
        "route_w": chosen.gates,
        "ffn_in": ffn_in,
        "ffn_out": ffn_out,
        "stream": streams,
        "pre_next": next_pre,
    }
    return FeedForwardOut(Residual(streams, next_pre), mean, trace)
