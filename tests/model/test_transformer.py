"""The forward under every cut of a prompt: the caches must make all cuts the same computation."""

import jax
import numpy as np
import pytest
from golden_network import golden_network, load

from deepinfer_jax.model.cache import BACKTRACK
from deepinfer_jax.runner.compile import trace_program
from deepinfer_jax.runner.step import init_state, pack_rows

ROWS, SLOTS, LENGTH = 16, 2, 64


class Runner:
    """Runs parts (slot, first position, ids) in steps of 16 rows, keeping the caches."""

    def __init__(self, network):
        self._network = network
        self._run = trace_program(network.network, network.mesh)

    def fresh(self):
        return init_state(self._network.network, slots=SLOTS, positions=LENGTH).cache

    def step(self, cache, *parts):
        """Hidden states and logits of each part, and the caches."""
        rows = pack_rows([(np.asarray(ids), at, slot) for slot, at, ids in parts], ROWS)
        out, logits = self._run(self._network.params, cache, rows, None, None)
        cuts = np.cumsum([len(ids) for _, _, ids in parts])
        hidden = np.split(np.asarray(out.hidden), cuts)[:-1]
        return hidden, np.split(np.asarray(logits), cuts)[:-1], out.cache

    def chunks(self, cache, ids, sizes, *, slot=0, begin=0):
        """Run `ids` in chunks; their hidden states and logits, and the caches."""
        hidden, logits = [], []
        for size in sizes:
            (h,), (x,), cache = self.step(cache, (slot, begin, ids[begin : begin + size]))
            begin, hidden, logits = begin + size, [*hidden, h], [*logits, x]
        assert begin == len(ids)
        return np.concatenate(hidden), np.concatenate(logits), cache


@pytest.fixture(scope="module")
def expected(golden):
    return load(golden / "p40_f32.npz")


@pytest.fixture(scope="module")
def decoded(golden):
    return load(golden / "decode_p40_t64_f32.npz")


@pytest.fixture(scope="module")
def runner(golden):
    return Runner(golden_network(golden, "f32"))


def assert_close(made, wanted, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=0)


CUTS = {
    "odd and even": [1, 2, 3, 7, 5, 4, 16, 2],
    "one by one": [1] * 40,
    "all odd": [3, 5, 7, 9, 11, 5],
    "longest first": [16, 16, 8],
}


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
def test_every_cut_of_a_prompt_gives_the_reference(runner, expected, sizes):
    ids = expected["token_ids"][0]
    hidden, logits, _ = runner.chunks(runner.fresh(), ids, sizes)
    assert_close(hidden, expected["final_hidden"][0], 1e-4)
    assert_close(logits, expected["logits"][0], 1e-4)


def test_the_caches_do_not_depend_on_the_cut(runner, expected):
    ids = expected["token_ids"][0]
    _, _, first = runner.chunks(runner.fresh(), ids, CUTS["longest first"])
    for name in ("odd and even", "all odd"):
        _, _, cache = runner.chunks(runner.fresh(), ids, CUTS[name])
        assert_close(cache, first)


def test_a_chunked_prompt_decodes_as_the_reference(runner, decoded):
    ids, prompt = decoded["token_ids"][0], int(decoded["prefill_len"])
    sizes = [7, 16, 3, 14]
    assert sum(sizes) == prompt
    sizes += [1] * (len(ids) - prompt)
    _, logits, _ = runner.chunks(runner.fresh(), ids, sizes)
    assert_close(logits[prompt - 1 :], decoded["logits"][0], 1e-4)


def test_sequences_of_one_step_do_not_see_each_other(runner, expected):
    ids = expected["token_ids"][0]
    other = ids[::-1].copy()
    cache, made, begin = runner.fresh(), [], 0
    # One sequence in chunks of 5 while the other decodes beside it.
    for at in range(8):
        parts = (1, at, other[at : at + 1]), (0, begin, ids[begin : begin + 5])
        _, (_, logits), cache = runner.step(cache, *parts)
        made.append(logits)
        begin += 5
    assert_close(np.concatenate(made), expected["logits"][0], 1e-4)
    (hidden,), _, _ = runner.step(cache, (1, 8, other[8:12]))
    alone, _, _ = runner.chunks(runner.fresh(), other[:12], [12])
    assert_close(hidden, alone[8:])


def test_the_next_owner_of_a_slot_gets_the_bits_of_an_unused_one(runner, expected):
    ids = expected["token_ids"][0]
    _, _, used = runner.chunks(runner.fresh(), ids[::-1], [16, 16, 8])
    made = runner.chunks(used, ids[:21], [16, 5])
    alone = runner.chunks(runner.fresh(), ids[:21], [16, 5])
    np.testing.assert_array_equal(made[0], alone[0])
    np.testing.assert_array_equal(made[1], alone[1])


@pytest.mark.parametrize("begin", [17, 24])
@pytest.mark.parametrize("extra", [1, 3, BACKTRACK])
def test_undone_rows_leave_no_trace(runner, expected, begin, extra):
    ids = expected["token_ids"][0]
    prompt = [16, begin - 16]
    wrong = (ids[begin : begin + extra] + 100) % 400
    _, _, cache = runner.chunks(runner.fresh(), ids[:begin], prompt)
    for i in range(extra):  # token by token, as a rejected draft or an undone answer would be
        _, _, cache = runner.step(cache, (0, begin + i, wrong[i : i + 1]))
    made = runner.chunks(cache, ids[:30], [2, 30 - begin - 2], begin=begin)
    _, _, cache = runner.chunks(runner.fresh(), ids[:begin], prompt)
    alone = runner.chunks(cache, ids[:30], [2, 30 - begin - 2], begin=begin)
    np.testing.assert_array_equal(made[0], alone[0])
    np.testing.assert_array_equal(made[1], alone[1])


def test_more_rows_than_the_ring_holds_cannot_be_undone(runner, expected):
    # What the property above rests on: beyond the ring's reserve the window is overwritten.
    ids = expected["token_ids"][0]
    _, _, cache = runner.chunks(runner.fresh(), ids[:17], [16, 1])
    _, _, cache = runner.step(cache, (0, 17, ids[25:25 + BACKTRACK + 4]))  # fmt: skip
    made = runner.chunks(cache, ids[:20], [3], begin=17)
    assert np.abs(made[0] - expected["final_hidden"][0, 17:20]).max() > 1e-3
