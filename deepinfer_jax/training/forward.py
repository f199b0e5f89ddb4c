"""The training forward: the same network as serving, over batched rows of packed segments.

Float32 reproduces the golden values; bfloat16 runs products in bfloat16 and everything else
(statistics, softmax, router, mixes) in float32, with streams rounded between sublayers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.layers import rope_table
from deepinfer_jax.ops.quant import qdq_fp4, qdq_fp4_e4m3, qdq_fp8
from deepinfer_jax.training.attend import Masks, attend, entry_masks, window_mask
from deepinfer_jax.training.engram import engram
from deepinfer_jax.training.experts import moe
from deepinfer_jax.training.hyper_connections import collapse, mixes, write_back
from deepinfer_jax.training.indexer import index_keys, index_loss, index_scores, select
from deepinfer_jax.training.linear import project, rms_norm
from deepinfer_jax.training.quantize import straight_through
from deepinfer_jax.training.rotary import rotate

Weights = Mapping[str, jax.Array]


@dataclass(frozen=True)
class ForwardOptions:
    """Static choices of a forward.

    Attributes:
        bfloat16: products and streams in bfloat16; else all in float32.
        kernel: mHC normalises in the GPU kernel.
        quantize_caches: round window rows, entries, index keys and queries as the caches do.
        decoder_start: first column of the decoder layers (those from the last kv source on); the
            earlier columns only feed them entries. Their window starts there too.
        chunk: query rows that share one static causal bound on entries; 0 for all rows at once.
    """

    bfloat16: bool = False
    kernel: bool = False
    quantize_caches: bool = False
    decoder_start: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class ForwardResult:
    """What a forward gives; r = t - decoder_start.

    Attributes:
        logits: float32 [b, r, v], from column `decoder_start`.
        hidden: [b, r, d] in the compute dtype, after the final norm; the head gives the logits.
        taps: [b, r, taps d] in the compute dtype, what the drafter reads: the mean of the streams
            that enter each layer of `dspark_target_layer_ids`; None without a drafter.
        index_loss: float32 scalar, a divergence per index source and valid row, summed over rows
            and averaged over sources.
        attention_peak: float32 [layers, heads], largest attention logit.
        index_peak: float32 scalar, largest absolute index score.
        load: float32 [layers, experts], tokens routed to each expert.
        selected: per index source, the bool masks of each chunk of query rows.
    """

    logits: jax.Array
    hidden: jax.Array
    taps: jax.Array | None
    index_loss: jax.Array
    attention_peak: jax.Array
    index_peak: jax.Array
    load: jax.Array
    selected: dict[int, Masks]


@dataclass
class _Source:
    """Entries, keys and the selection as the layers after a source see them."""

    entries: jax.Array | None = None
    keys: jax.Array | None = None
    visible: Masks = ()
    selected: Masks = ()
    scores: Masks = ()
    candidates: Masks | None = None
    mass: tuple[jax.Array, ...] = ()
    readers: int = 0


def forward(
    weights: Weights,
    ids: jax.Array,
    segments: jax.Array,
    hashes: jax.Array,
    config: ModelConfig,
    options: ForwardOptions,
    sparse: bool | jax.Array = True,
) -> ForwardResult:
    """Logits and training statistics of packed rows.

    Args:
        weights: float32 masters by training name.
        ids: int32 [b, t], t a multiple of the window.
        segments: int32 [b, t]; 0 is padding; a segment starts at an even column.
        hashes: int32 [b, t, engram layers, columns], table rows.
        config: the network's numbers.
        options: static choices.
        sparse: restrict entries to the selection; a traced bool chooses at run time.

    Raises ConfigError when t or `decoder_start` does not divide into windows.
    """
    run = _Run(weights, segments, config, options, sparse)
    embedded = weights["embed.weight"][ids].astype(run.dtype)
    streams = jnp.repeat(embedded[:, :, None, :], config.hc_mult, axis=2)
    pre = jnp.zeros(streams.shape[:3], jnp.float32).at[..., 0].set(1.0)
    for plan in config.layers:
        streams, pre = run.layer(plan, streams, pre, hashes)
    hidden = rms_norm(collapse(streams, pre), weights["norm.weight"], config.rms_norm_eps)
    logits = project(hidden, weights["head.weight"], jnp.float32, False)
    run.close_source()
    sources, r = max(len(run.selected), 1), hidden.shape[1]
    return ForwardResult(
        logits=logits,
        hidden=hidden,
        taps=jnp.concatenate([tap[:, -r:] for tap in run.taps], axis=-1) if run.taps else None,
        index_loss=run.index_loss / sources,
        attention_peak=jnp.stack(run.attention_peak),
        index_peak=run.index_peak,
        load=jnp.stack(run.load),
        selected=run.selected,
    )


class _Run:
    """One trace of the network: what layers hand to later layers."""

    def __init__(
        self,
        weights: Weights,
        segments: jax.Array,
        config: ModelConfig,
        options: ForwardOptions,
        sparse: bool | jax.Array,
    ):
        t, window = segments.shape[1], config.sliding_window
        if t % window or options.decoder_start % window or options.chunk % window:
            raise ConfigError(
                f"Rows of {t} columns, decoder start {options.decoder_start} and chunk "
                f"{options.chunk} do not divide by the window {window}.",
                "Window attention runs in blocks of the window.",
                "Pad the rows, and use multiples of the window.",
            )
        self.weights, self.segments, self.config, self.options = weights, segments, config, options
        self.sparse = sparse
        self.dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
        self.tables = {c: rope_table(config, t, compressed=c) for c in (False, True)}
        self.seen = window_mask(segments, window)
        self.start = 0
        self.source = _Source()
        self.index_loss = self.index_peak = jnp.zeros((), jnp.float32)
        self.attention_peak: list[jax.Array] = []
        self.load: list[jax.Array] = []
        self.taps: list[jax.Array] = []
        self.selected: dict[int, Masks] = {}

    def layer(
        self, plan: LayerPlan, streams: jax.Array, pre: jax.Array, hashes: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        config, weights, prefix = self.config, self.weights, f"layers.{plan.layer}"
        eps = config.rms_norm_eps
        if plan.engram is not None:
            rows = hashes[:, self.start :, plan.engram]
            streams = engram(streams, rows, weights, f"{prefix}.engram", config)
        if plan.tap:
            mean = jnp.mean(streams.astype(jnp.float32), axis=2)
            self.taps.append(mean.astype(self.dtype))
        x = rms_norm(collapse(streams, pre), weights[f"{prefix}.attn_norm.weight"], eps)
        if plan.owns_kv:
            self.compress(plan, x)
            last = plan.layer == max(config.kv_source_layer_ids)
            if last and self.options.decoder_start > self.start:
                cut = self.options.decoder_start - self.start
                self.start = self.options.decoder_start
                streams, pre, x = streams[:, cut:], pre[:, cut:], x[:, cut:]
                self.seen = window_mask(self.segments[:, self.start :], config.sliding_window)
        pre_attn, post, comb = mixes(
            streams, weights, f"{prefix}.hc_attn", config, kernel=self.options.kernel
        )
        streams = write_back(streams, self.attention(plan, x), post, comb)
        pre_ffn, post, comb = mixes(
            streams, weights, f"{prefix}.hc_ffn", config, kernel=self.options.kernel
        )
        x = rms_norm(collapse(streams, pre_attn), weights[f"{prefix}.ffn_norm.weight"], eps)
        y, chosen = moe(x, weights, f"{prefix}.ffn", config)
        valid = (self.segments[:, self.start :] > 0)[..., None]
        self.load.append(jnp.sum(chosen & valid, axis=(0, 1), dtype=jnp.float32))
        return write_back(streams, y, post, comb), pre_ffn

    def compress(self, plan: LayerPlan, x: jax.Array) -> None:
        """Entries and index keys of a kv source (model specification, "Compressor")."""
        self.close_source()
        config, weights, ratio = self.config, self.weights, plan.ratio
        name = f"layers.{plan.layer}.attn.compressor"
        if ratio == 2:
            u = project(x, weights[f"{name}.wkv.weight"], jnp.float32, False)
            g = project(x, weights[f"{name}.wgate.weight"], jnp.float32, False)
            pairs = (u.shape[0], u.shape[1] // 2, 2, u.shape[2])
            c = jnp.sum(jax.nn.softmax(g.reshape(pairs), axis=2) * u.reshape(pairs), axis=2)
            c = c.astype(self.dtype)
        else:
            c = project(x, weights[f"{name}.wkv.weight"], self.dtype, False)
        latent = rms_norm(c, weights[f"{name}.norm.weight"], config.rms_norm_eps)
        angles = self.tables[True][::ratio]
        entries = rotate(latent, angles)
        keys = index_keys(latent, angles, weights, plan.layer, config)
        if self.options.quantize_caches:
            entries = straight_through(qdq_fp4_e4m3, entries)
            keys = straight_through(qdq_fp4, keys)
        self.source = _Source(entries=entries, keys=keys)

    def attention(self, plan: LayerPlan, x: jax.Array) -> jax.Array:
        """The attention sublayer's output [b, r, d] (model specification, "Attention")."""
        config, weights = self.config, self.weights
        name = f"layers.{plan.layer}.attn"
        b, r, _ = x.shape
        h, d, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        angles = self.tables[plan.ratio > 0][self.start :]
        qr = project(x, weights[f"{name}.wq_a.weight"], self.dtype, False)
        qr = rms_norm(qr, weights[f"{name}.q_norm.weight"], eps)
        q = project(qr, weights[f"{name}.wq_b.weight"], self.dtype, False).reshape(b, r, h, d)
        kv = project(x, weights[f"{name}.wkv.weight"], self.dtype, False)
        kv = rotate(rms_norm(kv, weights[f"{name}.kv_norm.weight"], eps), angles)
        if self.options.quantize_caches:
            kv = straight_through(qdq_fp8, kv)
        if plan.owns_index:
            self.index(plan, x, qr)
        source = self.source if plan.ratio else _Source()
        # The scale is a power of two for the widths in use, so it costs no rounding.
        q = rotate(q, angles) * jnp.asarray(d**-0.5, self.dtype)
        o, mass, peak = attend(
            q, kv, source.entries, weights[f"{name}.attn_sink"], self.seen, source.selected
        )
        self.attention_peak.append(peak)
        if mass:
            source.mass = (
                tuple(a + m for a, m in zip(source.mass, mass, strict=True))
                if source.mass
                else tuple(mass)
            )
            source.readers += 1
        groups, rank = config.o_groups, config.o_lora_rank
        o = rotate(o, angles, inverse=True).reshape(b, r, groups, h * d // groups)
        low = weights[f"{name}.wo_a.weight"].astype(self.dtype).reshape(groups, rank, -1)
        z = jnp.einsum("brgi,gki->brgk", o, low, preferred_element_type=self.dtype)
        return project(
            z.reshape(b, r, groups * rank), weights[f"{name}.wo_b.weight"], self.dtype, False
        )

    def index(self, plan: LayerPlan, x: jax.Array, qr: jax.Array) -> None:
        """Scores and selection of an index source; closes the selection of the one before."""
        config, source = self.config, self.source
        if not plan.owns_kv:
            self.close_source()
        t = self.segments.shape[1]
        rows = t - self.start
        step = self.options.chunk if 0 < self.options.chunk < rows else rows
        bounds = [*range(self.start, t, step), t]
        if not source.visible:
            source.visible = entry_masks(self.segments, plan.ratio, bounds)
        assert source.keys is not None
        angles = self.tables[True][self.start :]
        source.scores, peak = index_scores(
            x,
            qr,
            source.keys,
            [(lo - self.start, hi - self.start, hi // plan.ratio) for lo, hi in _pairs(bounds)],
            angles,
            self.weights,
            plan.layer,
            config,
            quantize=self.options.quantize_caches,
        )
        self.index_peak = jnp.maximum(self.index_peak, peak)
        source.selected, candidates = select(
            source.scores, source.visible, source.candidates, bounds, plan, config, self.sparse
        )
        if plan.writes_candidates:
            source.candidates = candidates
        source.mass, source.readers = (), 0
        self.selected[plan.layer] = source.selected

    def close_source(self) -> None:
        """Add the index loss of the selection that ends here."""
        source = self.source
        if source.readers:
            mass = tuple(jax.lax.stop_gradient(m) / source.readers for m in source.mass)
            self.index_loss = self.index_loss + index_loss(source.scores, source.visible, mass)
            source.readers = 0


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1], bounds[1:], strict=True))
