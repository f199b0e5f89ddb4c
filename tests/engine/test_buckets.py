from dataclasses import replace

import numpy as np
import pytest
from engine_loop import limits

from deepinfer_jax.engine.buckets import Draws, fit, pack, plan_buckets
from deepinfer_jax.engine.plan import Running, View, Waiting, place
from deepinfer_jax.engine.planner import plan
from deepinfer_jax.runner.layout import STOP_IDS, Bucket, Flag, Part


@pytest.mark.parametrize(
    ("slots", "rows", "expected"),
    [
        (16, 512, [1, 4, 16, 32, 64, 128, 256, 512]),
        (256, 2048, [1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048]),
        (100, 1000, [1, 4, 16, 32, 64, 100, 128, 256, 512, 1000]),
        (3, 16, [1, 3, 16]),
        (1, 4096, [1, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
    ],
)
def test_buckets_are_few_and_reach_a_whole_step(slots, rows, expected):
    buckets = plan_buckets(limits(slots=slots, rows=rows, updates=slots + 9))
    assert [b.rows for b in buckets] == expected
    assert [b.parts for b in buckets] == [min(n, slots) for n in expected]
    assert all(b.decoder_rows == b.rows and b.updates == slots + 9 for b in buckets)


def test_a_step_fits_the_smallest_bucket():
    buckets = plan_buckets(limits(slots=16, rows=512, updates=40))
    assert [fit(buckets, n, n).rows for n in (1, 2, 4, 16, 17, 129, 512)] == [
        *(1, 4, 4, 16, 32, 256, 512),
    ]


def test_steps_that_keep_few_decoder_rows_have_a_narrow_form():
    buckets = plan_buckets(limits(slots=4, rows=512, updates=40), keep=140)
    sizes = [(b.rows, b.decoder_rows) for b in buckets]
    assert sizes == [
        *((1, 1), (4, 4), (32, 32), (64, 64), (128, 128)),
        *((256, 144), (256, 256), (512, 144), (512, 512)),
    ]
    assert fit(buckets, 200, 144).decoder_rows == 144
    assert fit(buckets, 200, 145).decoder_rows == 256


def mixed():
    """A plan of two sequences that decode, one that goes on with its prompt and one admission."""
    sizes = limits(slots=5, rows=16, pages=30, updates=20)
    run = Running.empty(5)
    run.request[:] = [7, -1, 8, 9, -1]
    run.prompt[:] = [4, 0, 5, 20, 0]
    run.limit[:] = [9, 0, 12, 22, 0]
    run.computed[:] = [4, 0, 7, 8, 0]
    run.allocated[:] = [1, 0, 2, 2, 0]
    run.order[:] = [1, 0, 2, 3, 0]
    run.keep[3] = 5
    new = Waiting(request=3, prompt=14, limit=15, pages=(21, 22, 23), replay=4, keep=2)
    view = View(
        step=5,
        retired=4,
        now=0.0,
        running=run,
        waiting=[new],
        allocatable=20,
        pending=0,
        frees=lambda slot: 0,
    )
    return place(plan(view, sizes, plan_buckets(sizes, keep=2)), [11, 12, 13, 14])


def test_a_plan_is_written_field_by_field():
    made = mixed()
    draws = Draws.greedy(5)
    draws.temperature[0], draws.top_p[3], draws.top_k[2] = 0.5, 0.75, 40
    draws.seed[0], draws.stops[2, :2] = (0xFFFFFFFF, 3), (6, 1)
    prompts = {3: np.arange(100, 120), 1: np.arange(200, 214)}
    forced = np.array([-1, -1, 66, 77, -1], np.int32)
    score_from = np.array([-1, -1, 10, -1], np.int32)
    ints, floats = pack(made, draws, prompts, forced, score_from)
    assert made.bucket == Bucket(16, 7, 5, 20)
    assert ints.dtype == np.int32 and ints.shape == (made.bucket.ints,)
    ids, parts, stops, updates, _ = made.bucket.split(ints)
    assert ids.tolist() == [0, 0, *range(108, 120), 208, 209]
    field = {f: parts[:, f].tolist() for f in Part}
    assert field[Part.SLOT] == [0, 2, 3, 1, -1]
    assert field[Part.OFFSET] == [0, 1, 2, 14, 0]
    assert field[Part.COUNT] == [1, 1, 12, 2, 0]
    assert field[Part.START] == [4, 7, 8, 8, 0]
    both = Flag.PROMPT | Flag.DRAWS
    assert field[Part.FLAGS] == [Flag.DRAWS, Flag.DRAWS, both, Flag.PROMPT, 0]
    assert field[Part.TOP_K] == [-1, 40, -1, -1, -1]
    assert field[Part.SEED_LOW] == [-1, 0, 0, 0, 0] and field[Part.SEED_HIGH] == [3, 0, 0, 0, 0]
    assert field[Part.LIMIT] == [9, 12, 22, 15, 0]
    assert field[Part.WRITE_FROM] == [0, 0, 0, 12, 0]
    assert field[Part.FLOOR] == [0, 0, 0, 8, 0]
    assert field[Part.KEEP_FROM] == [0, 0, 15, 12, 0]
    assert field[Part.FORCED] == [-1, 66, 77, -1, -1]
    assert field[Part.SCORE_FROM] == [-1, -1, 10, -1, -1]
    # After the end of a prompt comes what is forced there, and within it its own next token.
    assert field[Part.NEXT] == [-1, -1, 77, 210, -1]
    assert stops[1].tolist() == [6, 1] + [-1] * (STOP_IDS - 2)
    assert (np.delete(stops, 1, 0) == -1).all()
    grown = [[0, 1, 11], [3, 2, 12], [3, 3, 13], [3, 4, 14]]
    read = [[1, 0, 21], [1, 1, 22], [1, 2, 23]]
    assert updates[: len(made.updates)].tolist() == read + grown
    assert (updates[len(made.updates) :] == [-1, 0, 0]).all()
    assert floats.dtype == np.float32
    assert floats.tolist() == [[0.5, 1], [0, 1], [0, 0.75], [0, 1], [0, 1]]


def test_only_kept_rows_of_prompts_count_as_decoder_rows():
    sizes = limits(slots=2, rows=300, pages=90, max_model_len=300, table_pages=80, updates=90)
    waiting = [Waiting(request=0, prompt=200, limit=202, keep=8)]
    view = View(
        step=1,
        retired=0,
        now=0.0,
        running=Running.empty(2),
        waiting=waiting,
        allocatable=89,
        pending=0,
        frees=lambda slot: 0,
    )
    buckets = plan_buckets(sizes, keep=8)
    assert plan(view, sizes, buckets).bucket == Bucket(256, 10, 2, 90)
    whole = replace(view, waiting=[replace(waiting[0], keep=0)])
    assert plan(whole, sizes, buckets).bucket == Bucket(256, 256, 2, 90)
