"""The DSpark draft model: context keys from the network's taps, and one block of drafts.

A block is the anchor, the newest token at position P whose keys no cache holds yet, and noise up to
the trained width. Its row k stands at position P + k and predicts the token at P + k + 1 (draft
specification, "The DSpark draft model").
"""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.attention import own_keys, project, queries
from deepinfer_jax.model.cache import Rows, up_to_last
from deepinfer_jax.model.feed_forward import feed_forward
from deepinfer_jax.model.layers import rms_norm
from deepinfer_jax.model.params import Drafter, Layer, Params
from deepinfer_jax.model.streams import Residual, collapse, start_streams
from deepinfer_jax.model.transformer import Network, unembed
from deepinfer_jax.ops.packed import expand
from deepinfer_jax.ops.quant import Decode
from deepinfer_jax.ops.sparse_mla import Keys


def each_stage(drafter: Drafter) -> list[Layer]:
    """The stages' weights, first to last, without their leading axis of one."""
    return [jax.tree.map(lambda leaf: leaf[0], stage) for stage in drafter.stages]


def main_hidden(
    drafter: Drafter, taps: jax.Array, used: jax.Array | None = None, *, net: Network
) -> jax.Array:
    """What all stages read of the network, [n, d]: rms(main_proj [tap_1, tap_2, ...]; main_norm).

    Args:
        drafter: the draft model.
        taps: [taps, n, d], in ascending order of layers, as a forward leaves them.
        used: int32 [], rows up to the last that is not padding; None for all.
        net: configuration, arithmetic and kernels.
    """

    def projected(taps: jax.Array) -> jax.Array:
        joined = taps.reshape(taps.shape[0], -1)
        x = net.ops.linear(joined, drafter.main_proj, quantize=net.arithmetic.quantize_inputs)
        return rms_norm(x, drafter.main_norm, net.config.rms_norm_eps)

    with jax.named_scope("draft_main"):
        return net.ops.rowwise(projected, jnp.moveaxis(taps, 0, 1), used)


def context_keys(
    params: Params, drafter: Drafter, main: jax.Array, rows: Rows, *, net: Network
) -> jax.Array:
    """Keys [stages, n, stored k] of main hidden states [n, d] at the positions of `rows`.

    They pass through neither a stage's `attn_norm` nor its hyper-connections.
    """
    common = {"config": net.config.of_stages, "arithmetic": net.arithmetic, "ops": net.ops}

    def keys(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        attns = (stage.attn for stage in each_stage(drafter))
        return jnp.stack([own_keys(*part, params=attn, **common) for attn in attns], 1)

    with jax.named_scope("draft_context"):
        angles = params.rope_plain[rows.position]
        return jnp.moveaxis(net.ops.rowwise(keys, (main, angles), rows.used), 1, 0)


def write_context(rings: jax.Array, keys: jax.Array, rows: Rows) -> jax.Array:
    """The draft rings [stages, slots, r, stored k] with the keys of a step's rows.

    Rows of drafts that are rejected later may be among them: a block reads positions below its
    anchor alone, and the ring is long enough to be written again (see `model.cache`).
    """
    size = rings.shape[2]
    place = rows.writable(size), rows.position % size
    return rings.at[:, *place].set(keys, mode="drop")


def noised(anchor: jax.Array, config: ModelConfig) -> jax.Array:
    """Token ids int32 [p, g] of blocks: the anchors [p], then noise."""
    noise = (anchor.shape[0], config.dspark_block_size - 1)
    filled = jnp.full(noise, config.dspark_noise_token_id, jnp.int32)
    return jnp.concatenate([anchor[:, None], filled], 1)


@flax.struct.dataclass
class Places:
    """Where the n = p g rows of p blocks stand, one block after the other.

    Attributes:
        angles: float32 [n, 2, rope/2].
        real: bool [n], rows of a part that is not padding.
        ring: int32 [p, window], places of the context in a stage's flattened ring; seen: bool.
        width: rows of a block.
    """

    angles: jax.Array
    real: jax.Array
    ring: jax.Array
    seen: jax.Array
    width: int = flax.struct.field(pytree_node=False)


def _places(
    params: Params,
    position: jax.Array,
    slot: jax.Array,
    floor: jax.Array,
    size: int,
    config: ModelConfig,
) -> Places:
    """Of blocks whose anchors are at `position` of `slot`, int32 [p], in rings of `size`.

    The context begins at `floor` int32 [p].
    """
    width = config.dspark_block_size
    real = (slot >= 0) & (position >= 0)
    ahead = jnp.arange(width, dtype=jnp.int32)
    # Rows beyond the longest sequence only predict tokens that can never be used.
    last = params.rope_plain.shape[0] - 1
    at = jnp.clip(position[:, None] + ahead, 0, last).reshape(-1)
    context = position[:, None] - 1 - jnp.arange(config.sliding_window, dtype=jnp.int32)
    return Places(
        angles=params.rope_plain[at],
        real=jnp.repeat(real, width),
        ring=jnp.maximum(slot, 0)[:, None] * size + context % size,
        seen=real[:, None] & (context >= jnp.maximum(floor, 0)[:, None]),
        width=width,
    )


def _block_keys(kv: jax.Array, ring: jax.Array, places: Places, *, decode: Decode) -> Keys:
    """What a block sees, the same for all its rows: the window before its anchor, and itself.

    `kv` [n, stored k] are the rows' own keys, `ring` [slots, r, stored k] a stage's.
    """
    n, width = kv.shape[0], places.width
    block = jnp.arange(n, dtype=jnp.int32).reshape(-1, width)
    return Keys(
        pool=jnp.concatenate([kv, ring.reshape(-1, ring.shape[-1])]),
        at=jnp.concatenate([n + places.ring, block], 1),
        visible=jnp.concatenate([places.seen, places.real.reshape(-1, width)], 1),
        decode=decode,
    )


def _stage(
    residual: Residual, stage: Layer, ring: jax.Array, places: Places, *, net: Network
) -> Residual:
    """One stage on the rows of all blocks; `ring` [slots, r, stored k] is its own."""
    config, ops, attn = net.config, net.ops, stage.attn
    common = {"config": config, "arithmetic": net.arithmetic, "ops": ops}
    angles, used = places.angles, up_to_last(places.real)

    def enter(part: tuple[Residual, jax.Array]) -> tuple[jax.Array, jax.Array]:
        residual, angles = part
        x = rms_norm(collapse(residual), stage.attn_norm, config.rms_norm_eps)
        return queries(x, angles, attn, **common)[1], own_keys(x, angles, attn, **common)

    with jax.named_scope("attention"):
        q, kv = ops.rowwise(enter, (residual, angles), used)
        keys = _block_keys(kv, ring, places, decode=net.arithmetic.caches.window.decode)
        # The heads of a block's rows see the same keys: to the kernel they are those of one row.
        width, wide = places.width, (-1, places.width * q.shape[1], q.shape[2])
        sink = jnp.tile(attn.sink, width)
        heads = ops.sparse_mla(q.reshape(wide), keys, None, sink, scale=config.head_dim**-0.5)
        heads = heads.reshape(q.shape)
        out = ops.rowwise(
            lambda part: project(*part, params=attn, **common)[1], (heads, angles), used
        )
    text = jnp.zeros(places.real.shape, bool)
    return feed_forward(residual.streams, out, stage, text, places.real, **common).residual


def block_of(
    params: Params,
    drafter: Drafter,
    rings: jax.Array,
    ids: jax.Array,
    position: jax.Array,
    slot: jax.Array,
    floor: jax.Array,
    *,
    net: Network,
) -> tuple[jax.Array, jax.Array]:
    """`block` of given token ids int32 [p, g].

    Raises ConfigError for blocks of another width than the drafter was trained with.
    """
    p, width = ids.shape
    config = net.config.of_stages
    if width != config.dspark_block_size:
        raise ConfigError(
            f"A draft block of {width} tokens was asked for; the drafter's has "
            f"{config.dspark_block_size}.",
            "All rows of a block see each other, so a block of another width is one that the "
            "drafter was never trained on.",
            "Run the whole block and use its first drafts.",
        )
    net = replace(net, config=config)
    places = _places(params, position, slot, floor, rings.shape[2], config)
    embedded = params.embed[ids.reshape(-1)].astype(net.arithmetic.dtype)

    with jax.named_scope("draft_block"):
        residual = start_streams(embedded, config.hc_mult)
        for stage, ring in zip(each_stage(drafter), rings, strict=True):
            residual = _stage(residual, stage, ring, places, net=net)
        z = net.ops.rowwise(collapse, residual, up_to_last(places.real))
        base = unembed(replace(params, norm=drafter.norm), z, net)
    return z.reshape(p, width, -1), base.reshape(p, width, -1)


def block(
    params: Params,
    drafter: Drafter,
    rings: jax.Array,
    anchor: jax.Array,
    position: jax.Array,
    slot: jax.Array,
    floor: jax.Array,
    *,
    net: Network,
) -> tuple[jax.Array, jax.Array]:
    """One block of each of p parts, always of the trained width g = `dspark_block_size`.

    A row sees all rows of its block, later ones too, and the context keys of the positions
    max(floor, P - window) to P - 1, which its slot's rings must hold.

    Args:
        params: the network, for its embedding, head and rotary table.
        drafter: the draft model.
        rings: [stages, slots, r, stored k], context keys.
        anchor: int32 [p], the newest token of each part.
        position: int32 [p], its position P; below 0 marks padding.
        slot: int32 [p], the part's place in the rings; below 0 marks padding.
        floor: int32 [p], lowest position whose context key may be seen: below it a prefix was
            taken over or left out, and the rings have a hole.
        net: configuration, arithmetic and kernels.

    Returns:
        z [p, g, d], collapsed streams before the norm, and base logits float32 [p, g, v]: slot k
        is for position P + k + 1. Those of padding hold nothing of use.
    """
    ids = noised(anchor, net.config)
    return block_of(params, drafter, rings, ids, position, slot, floor, net=net)


def markov(
    drafter: Drafter, z: jax.Array, base: jax.Array, previous: jax.Array, *, net: Network
) -> tuple[jax.Array, jax.Array]:
    """Logits and confidence of one place of p blocks, given the token before it; all in float32.

    Args:
        drafter: the draft model.
        z: [p, d], this place's collapsed streams, before the norm.
        base: float32 [p, v], this place's base logits.
        previous: int32 [p], the token that precedes the one to draw: the anchor or the last draft.
        net: configuration, arithmetic and kernels.

    Returns:
        logits float32 [p, v] and confidence float32 [p], the logit of the chance that the token is
        accepted; it depends on no token after `previous`.
    """

    def place(part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, base, previous = part
        embedded = drafter.markov_embed[previous].astype(jnp.float32)
        weight = expand(drafter.confidence, jnp.float32)
        logits = base + net.ops.linear(embedded, drafter.markov_head)
        seen = jnp.concatenate([z.astype(jnp.float32), embedded], 1)
        return logits, jnp.einsum("pi,oi->po", seen, weight, precision="highest")[:, 0]

    with jax.named_scope("draft_markov"):
        return net.ops.rowwise(place, (z, base, previous))
