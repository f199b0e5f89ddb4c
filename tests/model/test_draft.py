"""The draft model against the reference, and what its blocks may and may not see."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits
from golden_network import golden_network, load
from short_llm import shorter_config, write_short_model

from deepinfer_jax.assembly import assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cache import BACKTRACK, init_cache
from deepinfer_jax.model.draft import (
    block,
    block_of,
    context_keys,
    main_hidden,
    markov,
    noised,
    write_context,
)
from deepinfer_jax.model.transformer import forward
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.runner.step import pack_rows
from deepinfer_jax.settings import EngineConfig

ROWS, PARTS, POSITIONS = 24, 6, 320
DECODES = ("p3_t24", "p40_t64", "p280_t300")


def drafted(params, rings, anchor, position, slot, *, net):
    """A block and its greedy drafts: z, base logits, ids [p, 1 + g], logits and confidence."""
    floor = jnp.zeros_like(position)
    z, base = block(params, params.drafter, rings, anchor, position, slot, floor, net=net)

    def draw(previous, place):
        logits, confidence = markov(params.drafter, *place, previous, net=net)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return token, (token, logits, confidence)

    places = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (z, base))
    _, drawn = jax.lax.scan(draw, anchor, places)
    tokens, logits, confidence = (jnp.moveaxis(x, 0, 1) for x in drawn)
    return z, base, jnp.concatenate([anchor[:, None], tokens], 1), logits, confidence


class Drafting:
    """A network with its drafter, its programs compiled for ROWS rows and PARTS blocks."""

    def __init__(self, assembled):
        self.net, self.params = replace(assembled.network, traced=False), assembled.params
        # Little optimised: compiling is what these tests wait for. `release` needs its roundings.
        options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}

        def program(function):
            return jax.jit(function, compiler_options=options)

        def remember(params, rings, main, rows):
            keys = context_keys(params, params.drafter, main, rows, net=self.net)
            return write_context(rings, keys, rows)

        def run(params, cache, rows):
            out = forward(params, cache, rows, net=self.net)
            main = main_hidden(params.drafter, out.taps, rows.used, net=self.net)
            return main, replace(out.cache, draft=remember(params, cache.draft, main, rows))

        self._run, self._remember = program(run), program(remember)
        self._draft = program(lambda *given: drafted(*given, net=self.net))
        self.main = program(lambda d, taps: main_hidden(d, taps, net=self.net))
        self.block_of = program(lambda p, *given: block_of(p, p.drafter, *given, net=self.net))

    def fresh(self, slots=1):
        config, arithmetic = self.net.config, self.net.arithmetic
        return init_cache(config, arithmetic, slots=slots, positions=POSITIONS, drafter=True)

    def step(self, cache, ids, begin):
        """Main hidden states of one chunk of slot 0, and the caches."""
        rows = pack_rows([(ids, begin, 0)], ROWS)
        main, cache = self._run(self.params, cache, rows)
        return np.asarray(main)[: len(ids)], cache

    def prefill(self, ids):
        cache = self.fresh()
        for begin in range(0, len(ids), ROWS):
            _, cache = self.step(cache, ids[begin : begin + ROWS], begin)
        return cache

    def remember(self, rings, main, begin):
        """Rings after `main` [n, d] of the positions from `begin` on, of slot 0."""
        rows = pack_rows([(np.zeros(len(main), np.int32), begin, 0)], ROWS)
        padded = np.zeros((ROWS, main.shape[1]), np.float32)
        padded[: len(main)] = main
        padded = jnp.asarray(padded, self.net.arithmetic.dtype)
        return self._remember(self.params, rings, padded, rows)

    def draft(self, rings, *parts):
        """z, base, ids, logits and confidence of (anchor, position, slot) parts."""
        columns = np.full((PARTS, 3), -1, np.int32)
        columns[: len(parts)] = parts
        made = self._draft(self.params, rings, *np.ascontiguousarray(columns.T))
        return [np.asarray(x.astype(jnp.float32))[: len(parts)] for x in made]


@pytest.fixture(scope="module")
def f32(golden):
    return Drafting(golden_network(golden, "f32", drafter=True))


SPEC = ("spec_base_logits", "spec_draft_ids", "spec_logits", "spec_confidence")


@pytest.mark.parametrize("name", DECODES)
def test_f32_drafts_as_the_reference(f32, golden, name):
    expected = load(golden / f"decode_{name}_f32.npz")
    ids, prompt = expected["token_ids"][0], int(expected["prefill_len"])
    anchors = expected["spec_draft_ids"][0, :, 0]  # the true next token, but for the last
    cache = f32.prefill(ids[:prompt])
    for i, position in enumerate(range(prompt, len(ids))):
        (main,), cache = f32.step(cache, ids[position : position + 1], position)
        _, *made = f32.draft(cache.draft, (anchors[i], position + 1, 0))
        wanted = [expected[name][0, i] for name in ("spec_main_x", *SPEC)]
        for x, y in zip((main, *(part[0] for part in made)), wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4, rtol=0, err_msg=str(position))


def last_blocks(drafting, expected):
    """Drafts after the last tokens, made of the reference's main hidden states, and its own.

    Each is a list of base logits, ids, logits and confidence, one row a block.
    """
    ids, main = expected["token_ids"][0], expected["spec_main_x"][0]
    window, begin = drafting.net.config.sliding_window, len(ids) - len(main)
    count = min(PARTS, len(main) - window + 1)  # whose windows are among these states
    held = window + count - 1
    rings = drafting.remember(drafting.fresh().draft, main[-held:], len(ids) - held)
    wanted = [expected[name][0, -count:] for name in SPEC]
    places = range(begin + len(main) - count + 1, len(ids) + 1)
    # All read one ring, which already holds what comes after most of them.
    parts = [(ids[0], at, 0) for ids, at in zip(wanted[1], places, strict=True)]
    return drafting.draft(rings, *parts)[1:], wanted


@pytest.fixture(scope="module")
def f32qdq(golden):
    return Drafting(golden_network(golden, "f32qdq", drafter=True))


@pytest.fixture(scope="module")
def release(golden):
    return Drafting(golden_network(golden, "release", drafter=True))


def relative(made, wanted):
    return np.sqrt(np.mean((made - wanted) ** 2) / np.mean(wanted**2))


def draws_as_f32qdq(drafting, expected):
    made, wanted = last_blocks(drafting, expected)
    for x, y in zip(made, wanted, strict=True):
        # A rounding that falls the other way moves a value by up to 5e-3.
        np.testing.assert_allclose(x, y, atol=5e-3, rtol=0)


def draws_as_release(drafting, expected):
    """Three layers of bfloat16: a last bit of the input moves the logits by 3e-2."""
    made, wanted = last_blocks(drafting, expected)
    assert np.median([relative(x, y) for x, y in zip(made[0], wanted[0], strict=True)]) < 5e-2
    # The rest follows from the drafts before it, while those are the same.
    same = np.cumprod(made[1] == wanted[1], 1).astype(bool)[:, :-1]
    assert same.mean() > 0.75
    for x, y in zip(made[2:], wanted[2:], strict=True):
        errors = np.abs(x - y)[same].reshape(same.sum(), -1).max(-1)
        assert np.median(errors) < 5e-2 * np.abs(y).max()


def test_f32qdq_drafts_as_the_reference(f32qdq, golden):
    draws_as_f32qdq(f32qdq, load(golden / "draft_p3_t24_f32qdq.npz"))


def test_release_drafts_as_the_reference(release, golden):
    draws_as_release(release, load(golden / "draft_p3_t24_release.npz"))


@pytest.mark.parametrize("name", DECODES)
def test_roundings_of_every_decode_are_those_of_the_reference(f32qdq, release, golden_dir, name):
    draws_as_f32qdq(f32qdq, load(golden_dir / f"decode_{name}_f32qdq.npz"))
    draws_as_release(release, load(golden_dir / f"decode_{name}_release.npz"))


def test_main_hidden_states_follow_from_the_references_taps(f32qdq, release, golden):
    # Positions 3 to 23 of one text, in a prefill here and token by token there.
    for drafting, name, limit in ((f32qdq, "f32qdq", 1e-5), (release, "release", 5e-2)):
        joined = load(golden / f"p40_{name}.npz")["main_hidden"][0, 3:24]
        taps = jnp.asarray(np.stack(np.split(joined, 3, -1)), drafting.net.arithmetic.dtype)
        made = drafting.main(drafting.params.drafter, taps).astype(jnp.float32)
        wanted = load(golden / f"draft_p3_t24_{name}.npz")["spec_main_x"][0]
        assert relative(np.asarray(made), wanted) < limit


def test_rings_hold_what_follows_from_the_streams_that_enter_the_tapped_layers(f32, golden):
    expected = load(golden / "p40_f32.npz")
    c, eps = f32.net.config, f32.net.config.rms_norm_eps
    drafter = jax.tree.map(lambda x: np.asarray(x, np.float64), f32.params.drafter)

    def rms(x, weight):
        return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)

    # The streams that enter a layer are those that leave the one before it; none has an Engram.
    streams = [expected[f"L{layer - 1}.stream"][0] for layer in c.dspark_target_layer_ids]
    taps = [sum(s[:, i].astype(np.float64) for i in range(4)) / 4 for s in streams]
    main = rms(np.concatenate(taps, -1) @ drafter.main_proj.values, drafter.main_norm)
    cache = f32.prefill(expected["token_ids"][0])
    half, ring = c.qk_rope_head_dim // 2, c.sliding_window + BACKTRACK
    assert cache.draft.shape == (3, 1, ring, c.head_dim)
    for stage in range(3):
        attn = jax.tree.map(lambda x: x[0], drafter.stages[stage].attn)
        for t in range(40 - ring, 40):
            key = rms(main[t] @ attn.wkv.values, attn.kv_norm)
            turned = key[-2 * half :].reshape(half, 2) @ (1, 1j)
            turned = turned * np.exp(1j * t * float(c.rope_theta) ** (-np.arange(half) / half))
            key[-2 * half :] = np.stack([turned.real, turned.imag], -1).reshape(-1)
            np.testing.assert_allclose(cache.draft[stage, 0, t % ring], key, atol=1e-4, rtol=0)


def test_a_tap_is_the_stream_that_enters_a_layer_with_its_engram_and_without_its_output(tmp_path):
    def silent(weights):
        """Layers whose outputs are nothing, so that only Engrams change the mean of the streams."""
        for name in weights:
            if name.startswith("layers.") and name.endswith(("wo_b.weight", "w2.weight")):
                weights[name][:] = 0

    # The first tapped layer has an Engram, the second none.
    folder = write_short_model(tmp_path / "model", shorter_config(), change=silent)
    config = ModelConfig.from_file(folder)
    assert (config.dspark_target_layer_ids, config.engram_layer_ids) == ((0, 1), (0,))
    engine = EngineConfig(model=str(folder), arithmetic="f32")
    token_map = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    made = assemble(folder, config, engine, token_map, traced=True)
    rows = pack_rows([(np.arange(20, 32), 0, 0)], 12)
    cache = init_cache(config, made.network.arithmetic, slots=1, positions=16)
    run = jax.jit(
        lambda *given: forward(*given, net=made.network),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    out = run(made.params, cache, rows)
    entered = np.asarray(out.trace["embed"])
    with_engram = np.asarray(out.trace["L0.engram_out"]).mean(1)  # the streams with it
    assert np.abs(with_engram - entered).max() > 1e-2
    for tap in np.asarray(out.taps):
        np.testing.assert_allclose(tap, with_engram, atol=1e-4)


@pytest.fixture(scope="module")
def rings(f32):
    shape = f32.fresh(slots=3).draft.shape
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def z_of(drafting, rings, ids, position=30, slot=1, floor=0):
    ids = np.tile(np.asarray(ids, np.int32), (PARTS, 1))
    places = (np.full(PARTS, value, np.int32) for value in (position, slot, floor))
    return np.asarray(drafting.block_of(drafting.params, rings, ids, *places)[0][0])


def test_every_row_of_a_block_sees_every_other(f32, rings):
    ids = np.asarray(noised(jnp.asarray([7], jnp.int32), f32.net.config))[0]
    assert ids.tolist() == [7, 499, 499, 499, 499]
    before = z_of(f32, rings, ids)
    for changed in range(5):
        other = ids.copy()
        other[changed] = 100 + changed
        assert (np.abs(z_of(f32, rings, other) - before).max(-1) > 1e-4).all(), changed


@pytest.mark.parametrize(("position", "floor"), [(30, 0), (3, 0), (30, 25)])
def test_a_block_sees_the_window_before_its_anchor_and_nothing_else(f32, rings, position, floor):
    ids, size = [7, 499, 499, 499, 499], rings.shape[2]
    seen = range(max(floor, position - f32.net.config.sliding_window), position)
    before = z_of(f32, rings, ids, position, floor=floor)
    hidden = np.full_like(rings, np.nan)
    for t in seen:
        hidden[:, 1, t % size] = rings[:, 1, t % size]
    assert_same_bits(z_of(f32, hidden, ids, position, floor=floor), before)
    for t in (seen[0], seen[-1]):
        for stage in range(3):
            other = rings.copy()
            other[stage, 1, t % size] += 1
            changed = z_of(f32, other, ids, position, floor=floor)
            assert (np.abs(changed - before).max(-1) > 1e-5).all()


def test_a_block_of_another_width_is_refused(f32, rings):
    with pytest.raises(ConfigError) as caught:
        f32.block_of(f32.params, rings, *(np.zeros(s, np.int32) for s in ((2, 4), 2, 2, 2)))
    assert str(caught.value) == (
        "A draft block of 4 tokens was asked for; the drafter's has 5. All rows of a block see "
        "each other, so a block of another width is one that the drafter was never trained on. "
        "Run the whole block and use its first drafts."
    )


LIVE = [(7, 30, 1), (9, 3, 2)]


def test_padding_between_blocks_changes_no_bit(f32, rings):
    expected = f32.draft(rings, LIVE[0], (-1, 30, -1), LIVE[1])
    for anchor, place in ((499, 17), (-1, 0)):
        padding = [(anchor, place, -1), (anchor, -1, 1)]
        made = f32.draft(rings, LIVE[0], padding[0], LIVE[1], *padding)
        again = f32.draft(rings, LIVE[0], padding[1], LIVE[1])
        for x, y, z in zip(made, again, expected, strict=True):
            for row in (0, 2):
                assert_same_bits(x[row], z[row])
                assert_same_bits(y[row], z[row])


def routed_or_nan(x, weights, ids, gates, **options):
    """Routed experts that give 1 to a row of theirs and no number to a row of none."""
    real = (ids < jax.tree.leaves(weights)[0].shape[0]).all(-1, keepdims=True)
    return jnp.where(real, jnp.ones(x.shape, jnp.float32), jnp.nan)


def test_padding_is_routed_to_no_expert_and_what_it_holds_is_not_seen(f32, rings):
    ops = f32.net.ops
    kernels = tuple(
        Kernel("experts", "routed_or_nan", routed_or_nan) if k.op == "experts" else k
        for k in ops.kernels
    )
    net = replace(f32.net, ops=replace(ops, kernels=kernels))
    anchor, position, slot = np.asarray([LIVE[0], (5, -1, 1), LIVE[1]], np.int32).T
    run = jax.jit(lambda p, *given: block(p, p.drafter, *given, net=net))
    z, base = run(f32.params, rings, anchor, position, slot, np.zeros_like(slot))
    assert np.isfinite(z[::2]).all() and np.isfinite(base[::2]).all()
    assert np.isnan(z[1]).all()


def test_packed_weights_draft_the_bits_of_dequantized_ones(f32, rings, golden):
    packed = Drafting(golden_network(golden, "f32", drafter=True, weights="packed"))
    for x, y in zip(packed.draft(rings, *LIVE), f32.draft(rings, *LIVE), strict=True):
        assert_same_bits(x, y)


def test_a_block_has_the_same_bits_in_any_company_where_that_is_promised(golden, rings):
    assembled = golden_network(golden, "f32", drafter=True, batch_invariant=True)
    params, net = assembled.params, replace(assembled.network, traced=False)
    run = jax.jit(lambda *given: drafted(params, *given, net=net))

    def of(*parts):
        return run(rings, *np.ascontiguousarray(np.asarray(parts, np.int32).T))

    among = of(LIVE[0], LIVE[1], (5, -1, 1), (3, 40, 0))
    for x, y in zip(among, of(LIVE[1]), strict=True):
        assert_same_bits(x[1], y[0])

    def keys(taps, rows):
        main = main_hidden(params.drafter, taps, rows.used, net=net)
        return context_keys(params, params.drafter, main, rows, net=net)

    taps = np.random.default_rng(1).standard_normal((3, 20, net.config.hidden_size))
    taps, remember = taps.astype(np.float32), jax.jit(keys)
    rows = [pack_rows([(np.zeros(n, np.int32), 30 - n, 0)], n) for n in (20, 1)]
    assert_same_bits(remember(taps, rows[0])[:, -1:], remember(taps[:, -1:], rows[1]))
