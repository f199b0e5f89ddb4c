"""The device's half of scheduling: rows from plans, bounded replay, and what a step leaves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_network import golden_network, load

from deepinfer_jax.model.transformer import forward, unembed
from deepinfer_jax.runner.layout import Bucket, DraftWord, Flag, Part
from deepinfer_jax.runner.schedule import Drafts, StepInput, committed, derive, emit, with_pages
from deepinfer_jax.runner.step import init_state

ROWS, SLOTS, PAGES = 32, 3, 9


def plan(bucket, *parts, updates=()):
    """A `StepInput` of parts given as dictionaries: column name -> value, and `ids`."""
    ints, floats = bucket.empty()
    ids, columns, stops, pages, _ = bucket.split(ints)
    at = 0
    for i, part in enumerate(parts):
        tokens = part.pop("ids", None)
        flags = part.pop("flags", Flag.DRAWS)
        if tokens is not None:
            flags |= Flag.PROMPT
            ids[at : at + len(tokens)] = tokens
            part = {"count": len(tokens)} | part
        part = {"count": 1, "limit": 10_000, "offset": at} | part
        stop = part.pop("stops", ())
        stops[i, : len(stop)] = stop
        for name, value in part.items():
            columns[i, Part[name.upper()]] = value
        columns[i, Part.FLAGS] = flags
        at += part["count"]
    for i, update in enumerate(updates):
        pages[i] = update
    return StepInput(jnp.asarray(ints), jnp.asarray(floats))


@pytest.fixture(scope="module")
def network(golden):
    return golden_network(golden, "f32")


@pytest.fixture(scope="module")
def state(network):
    return init_state(network.network, slots=SLOTS, positions=256, pages=PAGES)


BUCKET = Bucket(rows=8, decoder_rows=8, parts=4, updates=5)


def after_drawing(state, made, token, bad=()):
    """The state after every row drew `token`, with nothing accepted, and who ended."""
    tokens = jnp.full(made.at.shape, token, jnp.int32)
    broken = jnp.isin(made.at, jnp.asarray(bad, jnp.int32))
    emitted = emit(made, tokens, broken, jnp.zeros(made.slot.shape[0], jnp.int32))
    return committed(state, state.cache, made, tokens, emitted), emitted.ended


def test_rows_follow_from_the_plan_and_the_state(state):
    state = state.replace(
        token=jnp.asarray([70, 80, 90], jnp.int32), length=jnp.asarray([5, 6, 7], jnp.int32)
    )
    given = plan(
        BUCKET,
        {"slot": 2, "top_k": 3, "seed_low": -1, "limit": 9, "stops": [4]},
        {"slot": 0, "ids": [11, 12, 13], "start": 128, "floor": 100, "write_from": 130},
    )
    made = derive(state, given, BUCKET)
    rows = jax.tree.map(lambda x: np.asarray(x)[:5].tolist(), made.rows)
    assert rows.ids[:4] == [90, 11, 12, 13]
    assert rows.position == [7, 128, 129, 130, -1]
    assert (rows.slot[:4], rows.start[:4]) == ([2, 0, 0, 0], [7, 128, 128, 128])
    assert (rows.stop[:4], rows.floor[:4]) == ([8, 131, 131, 131], [0, 100, 100, 100])
    assert rows.write_from[:4] == [0, 130, 130, 130]
    assert np.asarray(made.take)[:2].tolist() == [0, 3]
    assert np.asarray(made.draw.position)[:2].tolist() == [8, 131]
    assert np.asarray(made.draw.seed)[0].tolist() == [2**32 - 1, 0]
    assert np.asarray(made.draws).tolist() == [True, True, False, False]
    assert made.kept is None


def test_a_sequence_that_has_ended_runs_no_rows_and_changes_nothing(state):
    state = state.replace(done=jnp.asarray([False, True, False]))
    given = plan(BUCKET, {"slot": 0}, {"slot": 1}, {"slot": 2})
    made = derive(state, given, BUCKET)
    assert np.asarray(made.rows.position)[:4].tolist() == [0, -1, 0, -1]
    assert np.asarray(made.draws).tolist() == [True, False, True, False]
    after, ended = after_drawing(state, made, 5)
    assert np.asarray(after.token).tolist() == [5, 0, 5]
    assert np.asarray(after.length).tolist() == [1, 0, 1]
    assert np.asarray(after.done).tolist() == [False, True, False]
    assert not np.asarray(ended).any()


def test_the_device_sees_stop_ids_limits_and_undrawable_rows(state):
    given = plan(
        BUCKET,
        {"slot": 0, "stops": [3, 5]},
        {"slot": 1, "limit": 2},
        {"slot": 2, "ids": [1, 2], "flags": Flag(0), "stops": [5]},
    )
    made = derive(state, given, BUCKET)
    after, ended = after_drawing(state, made, 5)
    # The third part draws nothing, so what its last row would draw ends nothing.
    assert np.asarray(ended).tolist() == [True, True, False, False]
    assert np.asarray(after.done).tolist() == [True, True, False]
    assert np.asarray(after.length).tolist() == [1, 1, 2]
    given = plan(BUCKET, {"slot": 0}, {"slot": 1})
    _, ended = after_drawing(state, derive(state, given, BUCKET), 5, bad=[1])
    assert np.asarray(ended).tolist() == [False, True, False, False]


def test_new_pages_enter_the_table_and_no_other(state):
    given = plan(BUCKET, updates=[(1, 0, 7), (2, 1, 4)])
    table = np.asarray(with_pages(state.cache, given, BUCKET).table)
    assert table.tolist() == [[0, 0], [7, 0], [0, 4]]


DRAFTED = Bucket(rows=12, decoder_rows=12, parts=4, updates=5, drafts=3)


@pytest.fixture
def drafted(state):
    """Three sequences with three drafts each; those of slot 2 are the surest."""
    token = jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], jnp.int32)
    sure = jnp.asarray([[0.5, 0.5, 0.5], [0.1, 0.1, 0.1], [0.9, 0.9, 0.9]], jnp.float32)
    return state.replace(
        token=jnp.asarray([70, 80, 90], jnp.int32),
        length=jnp.asarray([5, 6, 7], jnp.int32),
        drafts=Drafts(token, sure),
    )


def verifying(bucket, budget=-1):
    """Slots 2 and 0 with up to three and one drafts, and a prompt of slot 1 behind them."""
    given = plan(
        bucket,
        {"slot": 2, "count": 4},
        {"slot": 0, "count": 2},
        {"slot": 1, "ids": [11, 12, 13], "start": 128},
    )
    drafting = bucket.ints - len(DraftWord)
    return given.replace(ints=given.ints.at[drafting + DraftWord.VERIFIED].set(budget))


def listed(made, count):
    """(slot, position, id) of the rows that are there, and their numbers."""
    there = np.flatnonzero(np.asarray(made.rows.position) >= 0)
    assert len(there) == count
    columns = made.rows.slot, made.rows.position, made.rows.ids
    return list(zip(*(np.asarray(c)[there].tolist() for c in columns), strict=True)), there


@pytest.mark.parametrize(("varlen", "budget"), [(False, -1), (True, -1), (True, 4)])
def test_every_draft_has_a_row_and_every_row_that_draws_finds_its_way_back(drafted, varlen, budget):
    made = derive(drafted, verifying(DRAFTED, budget), DRAFTED, varlen=varlen)
    rows, _ = listed(made, 9)
    assert rows == [
        *((2, 7, 90), (2, 8, 7), (2, 9, 8), (2, 10, 9)),
        *((0, 5, 70), (0, 6, 1)),
        *((1, 128, 11), (1, 129, 12), (1, 130, 13)),
    ]
    assert made.drafts[:3].tolist() == [[7, 8, 9], [1, -1, -1], [-1, -1, -1]]
    assert made.drawn[:3].tolist() == [4, 2, 1]
    for part, (slot, first, drawn) in enumerate([(2, 7, 4), (0, 5, 2), (1, 130, 1)]):
        for place in range(drawn):
            draw = int(made.at[part, place])
            row = int(made.take[draw])
            assert int(made.rows.slot[row]) == slot
            assert int(made.rows.position[row]) == first + place
            assert int(made.draw.position[draw]) == first + place + 1


def test_what_was_not_proposed_has_no_row(drafted):
    token = drafted.drafts.token.at[2].set(-1)
    drafted = drafted.replace(drafts=drafted.drafts.replace(token=token))
    made = derive(drafted, verifying(DRAFTED), DRAFTED)
    rows, _ = listed(made, 6)
    assert rows[:3] == [(2, 7, 90), (0, 5, 70), (0, 6, 1)]
    assert made.drafts[:2].tolist() == [[-1, -1, -1], [1, -1, -1]]
    assert made.drawn[:3].tolist() == [1, 2, 1]


def test_a_budget_goes_to_the_surest_drafts_and_leaves_a_gap_before_prompts(drafted):
    made = derive(drafted, verifying(DRAFTED, 2), DRAFTED, varlen=True)
    rows, there = listed(made, 7)
    assert rows[:4] == [(2, 7, 90), (2, 8, 7), (2, 9, 8), (0, 5, 70)]
    assert there.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert made.drafts[:2].tolist() == [[7, 8, -1], [-1, -1, -1]]
    assert made.drawn[:3].tolist() == [3, 1, 1]
    assert made.take[made.at[:3, 0]].tolist() == [0, 3, 8]


def test_a_larger_bucket_only_adds_padding(drafted):
    small, large = DRAFTED, Bucket(20, 20, 6, 5, 3)
    a, b = (derive(drafted, verifying(bucket), bucket) for bucket in (small, large))
    assert (listed(a, 9)[0], listed(a, 9)[1].tolist()) == (
        listed(b, 9)[0],
        listed(b, 9)[1].tolist(),
    )
    for name in ("slot", "end", "last", "drawn", "drafts", "draws"):
        x, y = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        np.testing.assert_array_equal(x, y[:4], err_msg=name)
    assert not np.asarray(b.draws)[3:].any() and not np.asarray(b.drawn)[3:].any()
    assert (np.asarray(b.slot)[3:] >= SLOTS).all() and (np.asarray(b.drafts)[3:] == -1).all()


@pytest.fixture(scope="module")
def replayed(golden):
    return load(golden / "replay_p300_f32.npz")


def prefill(network, ids, *, chunk, keep, decoder_rows, first_exact):
    """The decoder run on the last `keep` rows only: their logits and streams of layers 6 and 7."""
    bucket = Bucket(rows=chunk, decoder_rows=decoder_rows, parts=2, updates=4)

    # Compiling is all of the time here, and no bit is compared with another program's.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, state, inputs):
        plan = derive(state, inputs, bucket, truncate=True, first_exact=first_exact)
        cache = with_pages(state.cache, inputs, bucket)
        out = forward(params, cache, plan.rows, kept=plan.kept, net=network.network)
        state, _ = after_drawing(state.replace(cache=out.cache), plan, 0)
        shown = {n: out.trace[n] for n in ("L6.stream", "L7.stream")}
        shown["logits"] = unembed(params, out.hidden, network.network)
        return state, plan.kept.rows.position, shown

    state = init_state(network.network, slots=SLOTS, positions=384, pages=PAGES)
    keep_from, made = len(ids) - keep, []
    for begin in range(0, len(ids), chunk):
        part = {"slot": 1, "ids": ids[begin : begin + chunk], "start": begin}
        pages = [(1, i, 8 - i) for i in range(3)] if begin == 0 else ()
        given = plan(bucket, part | {"keep_from": keep_from}, updates=pages)
        state, position, shown = run(network.params, state, given)
        kept = np.asarray(position) >= keep_from
        made.append((position[kept], *(np.asarray(x)[kept] for x in shown.values())))
    position, *arrays = (np.concatenate(parts) for parts in zip(*made, strict=True))
    assert position.tolist() == list(range(keep_from, len(ids)))
    return dict(zip(shown, arrays, strict=True))


@pytest.mark.parametrize("variant", ["truncate_all", "first_exact"])
def test_bounded_replay_of_a_prompt_in_chunks_gives_the_reference(network, replayed, variant):
    ids, keep = replayed["token_ids"], int(replayed["keep"])
    given = {"keep": keep, "first_exact": variant == "first_exact"}
    made = prefill(network, ids, chunk=64, decoder_rows=20, **given)
    # The reference is float64; in `first_exact` one row selects otherwise in layer 8.
    rows = keep if variant == "truncate_all" else 3
    np.testing.assert_allclose(
        made["L6.stream"], replayed[f"L6.stream_{variant}"], atol=1e-4, rtol=0
    )
    np.testing.assert_allclose(
        made["L7.stream"], replayed[f"L7.stream_{variant}"], atol=1e-4, rtol=0
    )
    expected = replayed[f"logits_{variant}"]
    np.testing.assert_allclose(made["logits"][:rows], expected[:rows], atol=1e-4, rtol=0)


def test_masked_rows_give_what_rows_left_out_give(network, replayed):
    ids = replayed["token_ids"]
    made = prefill(network, ids, chunk=100, keep=16, decoder_rows=100, first_exact=False)
    expected = replayed["logits_truncate_all"]
    np.testing.assert_allclose(made["logits"], expected, atol=1e-4, rtol=0)
