"""A layer that writes and reads every kind of key gives the same bits from records.

Under `release`; `tests/runner/test_cache_formats.py` runs whole steps under `f32qdq`.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.assembly import assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.attention import Shared, attention
from deepinfer_jax.model.cache import init_cache
from deepinfer_jax.model.compressor import compress
from deepinfer_jax.runner.step import pack_rows
from deepinfer_jax.settings import EngineConfig

LAYER, ROWS, POSITIONS = 2, 24, 140  # a ratio-2 source; more positions than a page has
CHUNKS = [24, 23, 24, 1, 24, 24, 1, 1, 18]


@pytest.fixture(scope="module")
def network(short_folder):
    config = ModelConfig.from_file(short_folder)
    engine = EngineConfig(model=str(short_folder), arithmetic="release")
    return assemble(short_folder, config, engine, np.arange(config.vocab_size, dtype=np.int32))


def block(params, cache, rows, x, *, net, chosen):
    """Attention of one source layer, and the caches with this step's keys; the rest is left out."""
    config = net.network.config
    common = {"config": config, "arithmetic": chosen, "ops": net.network.ops}
    plan = config.layers[LAYER]
    (run,) = (i for i, run in enumerate(config.runs) if run[0].layer == LAYER)
    layer = jax.tree.map(lambda leaf: leaf[0], params.runs[run])
    rope = params.rope_compressed
    compressed, source = compress(
        x,
        layer.compressor,
        layer.indexer,
        rows,
        cache.sources[0],
        cache.table,
        rope,
        ratio=plan.ratio,
        **common,
    )
    ring, shared = cache.window[LAYER], Shared(source)
    out = attention(x, layer, rows, ring, cache.table, shared, rope, plan=plan, **common)
    place = rows.writable(ring.shape[1]), rows.position % ring.shape[1]
    window = cache.window.at[LAYER, *place].set(out.window_kv, mode="drop")
    caches = chosen.caches
    keys = (
        caches.window.decode(out.window_kv, chosen.dtype),
        caches.entry.decode(compressed.entry, chosen.dtype),
        caches.index_key.decode(compressed.index_key, chosen.dtype),
    )
    assert out.selection is not None
    cache = replace(cache, window=window, sources=(source, *cache.sources[1:]))
    return cache, (out.out, out.heads, out.selection.entries, *keys)


def outputs(net, cache_format):
    chosen = arithmetic("release", cache_format)
    # Little optimised: compiling is what this test waits for.
    quick = {"xla_backend_optimization_level": 0}
    run = jax.jit(partial(block, net=net, chosen=chosen), compiler_options=quick)
    cache = init_cache(net.network.config, chosen, slots=2, positions=POSITIONS)
    # What an earlier owner left must not show, not even where it is no number.
    cache = replace(
        cache, window=cache.window.view(np.uint8).at[...].set(0xFF).view(cache.window.dtype)
    )
    width, begin, made = net.network.config.hidden_size, 0, []
    x = np.random.default_rng(0).standard_normal((POSITIONS, width)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(1).integers(-6, 7, (POSITIONS, width)))
    for n in CHUNKS:
        rows = jax.tree.map(jax.numpy.asarray, pack_rows([(np.zeros(n, int), begin, 1)], ROWS))
        part = np.zeros((ROWS, width), np.float32)
        part[:n] = x[begin : begin + n]
        cache, out = run(net.params, cache, rows, jax.numpy.asarray(part).astype(chosen.dtype))
        made.append([np.asarray(value)[:n] for value in out])
        begin += n
    assert begin == POSITIONS
    return [np.concatenate(values) for values in zip(*made, strict=True)]


def test_records_give_the_bits_of_caches_of_numbers(network):
    expected = outputs(network, "bf16")
    assert np.isfinite(expected[0].astype(np.float32)).all() and np.ptp(expected[2][-1]) > 0
    for made, wanted in zip(outputs(network, "release"), expected, strict=True):
        assert_same_bits(made, wanted)
