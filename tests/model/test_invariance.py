"""The bits of a row in batch-invariant arithmetic, under every cut, company and prefix."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from bitwise import assert_same_bits
from jax.sharding import AxisType
from short_llm import shorter_config, write_short_model

from deepinfer_jax.assembly import assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.prefix import hit, replay
from deepinfer_jax.model.cache import PAGE
from deepinfer_jax.runner.compile import replicated, trace_program
from deepinfer_jax.runner.step import init_state, pack_rows
from deepinfer_jax.settings import EngineConfig

PROMPT, DECODED, SLOTS, LENGTH = 300, 12, 3, 512
BUCKETS = (1, 16, 512)  # rows of the programs; a step takes the smallest that holds it
RNG = np.random.default_rng(5)
IDS, OTHER = RNG.integers(3, 272, (2, PROMPT)).astype(np.int32)


class Cut:
    """Runs a prompt in chunks, with or without another sequence in front."""

    def __init__(self, network):
        self.network, self.params = network.network, network.params
        self._run = trace_program(network.network, network.mesh)
        self._whole = replicated(network.mesh)

    def fresh(self):
        return init_state(self.network, slots=SLOTS, positions=LENGTH).cache

    def step(self, cache, *parts, **columns):
        """Logits of the last part's rows and the caches; `columns` replaces columns of `Rows`."""
        count = sum(len(ids) for ids, _, _ in parts)
        rows = pack_rows(parts, next(b for b in BUCKETS if b >= count))
        rows = replace(rows, **{k: np.full_like(rows.ids, v) for k, v in columns.items()})
        # A cache that no step gave would be another kind of argument and compile once more.
        cache = jax.device_put(cache, self._whole)
        out, logits = self._run(self.params, cache, rows, None, None)
        return np.asarray(logits)[count - len(parts[-1][0]) : count], out.cache

    def chunks(self, size, *, slot=1, company=0, cache=None, begin=0, **columns):
        """Logits of the prompt from `begin` on, run `size` tokens a step, and the caches.

        `company` tokens of another sequence come first in each step. The last `DECODED` tokens
        come one by one.
        """
        cache, logits, at = cache or self.fresh(), [], begin
        while at < PROMPT:
            end = min(at + size, PROMPT - DECODED) if at < PROMPT - DECODED else at + 1
            parts = [(IDS[at:end], at, slot)]
            if company:
                first = len(logits) * company
                parts.insert(0, (OTHER[first : first + company], first, 2))
            made, cache = self.step(cache, *parts, **columns)
            logits.append(made)
            at = end
        return np.concatenate(logits), cache


def cut_of(folder, *, batch_invariant=True, **engine):
    config = ModelConfig.from_file(folder)
    engine = EngineConfig(model=str(folder), batch_invariant=batch_invariant, **engine)
    return Cut(assemble(folder, config, engine, np.arange(config.vocab_size, dtype=np.int32)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_short_model(tmp_path_factory.mktemp("model") / "shorter", shorter_config())


@pytest.fixture(scope="module")
def cut(folder):
    return cut_of(folder, arithmetic="f32")


@pytest.fixture(scope="module")
def cold(cut):
    """Logits and caches of the prompt in one step."""
    return cut.chunks(512)


def assert_same_sequence(made, expected, slot=1):
    """Logits and everything that the sequence of `slot` left in the caches."""
    assert_same_bits(made[0], expected[0])
    for a, b in views(made[1], slot, expected[1]):
        assert_same_bits(a, b)


def views(made, slot, expected):
    """Pairs of what `slot` owns in one cache and slot 1 in the other."""
    found = [
        (made.window[:, slot], expected.window[:, 1]),
        (made.history[slot], expected.history[1]),
    ]
    for a, b in zip(made.sources, expected.sources, strict=True):
        own, other = np.asarray(made.table[slot]), np.asarray(expected.table[1])
        found.append((a.entries[own], b.entries[other]))
        found.append((a.index_keys[own], b.index_keys[other]))
        if a.raw is not None:
            found.append((a.raw[slot], b.raw[1]))
    return found


# A prompt of 300 tokens in chunks of 4096 is the step of 512 rows that the others are held against.
@pytest.mark.parametrize("size", [16, 64, 128])
def test_every_chunk_size_gives_the_same_bits(cut, cold, size):
    assert_same_sequence(cut.chunks(size), cold)


def test_other_sequences_other_pages_and_another_place_change_nothing(cut, cold):
    assert_same_sequence(cut.chunks(100, slot=0, company=17), cold, slot=0)


def test_a_token_by_itself_has_the_bits_of_a_prefill(cut, cold):
    whole, _ = cut.step(cut.fresh(), (IDS, 0, 1))
    assert_same_bits(whole, cold[0])


def test_rounded_arithmetic_and_packed_weights_keep_a_sequence_apart_as_well(folder):
    release = cut_of(folder, arithmetic="release", weights="packed")
    expected = release.chunks(512)  # activations in bfloat16, caches of records
    assert_same_sequence(release.chunks(200, slot=0, company=100), expected, slot=0)
    assert_same_sequence(release.chunks(16), expected)


def test_without_the_promise_the_checks_above_find_other_bits(cut, folder):
    """Case C01's control: the fast kernels' logits depend on how many rows a step has."""

    def one_by_one_and_together(cut):
        cache, logits = cut.fresh(), []
        for i in range(12):
            made, cache = cut.step(cache, (IDS[i : i + 1], i, 1))
            logits.append(made)
        return np.concatenate(logits), cut.step(cut.fresh(), (IDS[:12], 0, 1))[0]

    alone, together = one_by_one_and_together(
        cut_of(folder, arithmetic="f32", batch_invariant=False)
    )
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(alone, together)
    assert_same_bits(*one_by_one_and_together(cut))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_device_of_a_mesh_computes_the_bits_of_one_device_alone(cut, devices):
    """As long as a network is not split, this is all that layouts can be asked for."""
    parts = (OTHER[:6], 0, 2), (IDS[:9], 0, 1)
    logits, cache = cut.step(cut.fresh(), *parts)
    expected = [logits, *jax.tree.leaves(cache)]
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    given = jax.device_put((cut.params, cut.fresh(), pack_rows(parts, 16)), replicated(mesh))
    out, logits = trace_program(cut.network, mesh)(*given, None, None)
    made = [logits[len(parts[0][0]) :][: len(parts[1][0])], *jax.tree.leaves(out.cache)]
    for a, b in zip(made, expected, strict=True):
        assert len(a.addressable_shards) == devices
        for shard in a.addressable_shards:
            assert_same_bits(shard.data, b)


def test_a_prefix_hit_gives_the_bits_of_a_cold_run(cut, cold):
    config = cut.network.config
    again = replay("exact", config.sliding_window, config.num_hidden_layers, 1)
    read, first = hit(PROMPT // PAGE, PROMPT, again)
    assert 0 < first < read < PROMPT
    # The pages of the cold run, those beyond the hit spoilt, and windows that hold nothing.
    fresh = cut.fresh()
    pages = np.asarray(fresh.table[1])

    def spoilt(entries):
        entries = np.array(entries)
        entries[pages[read // PAGE :]] = np.nan
        return entries

    sources = tuple(
        replace(s, entries=spoilt(c.entries), index_keys=spoilt(c.index_keys))
        for s, c in zip(fresh.sources, cold[1].sources, strict=True)
    )
    warm = replace(fresh, sources=sources)
    logits, cache = cut.chunks(64, cache=warm, begin=first, floor=first, write_from=read)
    assert_same_bits(logits[read - first :], cold[0][read:])
    for made, expected in zip(cache.sources, cold[1].sources, strict=True):
        for a, b in ((made.entries, expected.entries), (made.index_keys, expected.index_keys)):
            written = PROMPT * a.shape[1] // PAGE
            width = a.shape[-1]
            assert_same_bits(
                np.asarray(a[pages]).reshape(-1, width)[:written],
                np.asarray(b[pages]).reshape(-1, width)[:written],
            )
