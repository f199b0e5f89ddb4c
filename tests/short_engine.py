"""Driving an engine on the short network, step by step."""

import numpy as np
from short_llm import LIMIT

from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.model.cache import pages_of

SLOTS, TABLE = 4, pages_of(LIMIT)
LIMITS = Limits(
    slots=SLOTS,
    rows=64,
    pages=1 + SLOTS * TABLE,
    max_model_len=LIMIT,
    table_pages=TABLE,
    updates=SLOTS + 1 + TABLE,
    look_back=4,
)


def few_pages(engine, left):
    """Take all but `left` pages away; the engine is as one of fewer pages, with its programs."""
    engine.held = engine.pool.allocate(engine.pool.allocatable - left)
    return engine


def check_empty(engine):
    """Nobody holds a page, but for those that were taken away."""
    engine.pool.check([getattr(engine, "held", [])])
    assert engine.pool.pending == 0 and not engine.has_work


def drive(engine, arrivals, aborts=()):
    """Run to the end; `arrivals` are (step, sequence), `aborts` (step, place of the sequence)."""
    numbers, step = {}, 0
    while engine.has_work or len(numbers) < len(arrivals):
        for place, (when, sequence) in enumerate(arrivals):
            if when == step:
                numbers[place] = engine.add(sequence)
        for when, place in aborts:
            if when == step and place in numbers:
                engine.abort(numbers[place])
        if engine.has_work:
            engine.step()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    check_empty(engine)


def requests(sequence_of, seed, count, longest):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = rng.integers(3, 250, int(rng.integers(1, longest)))
        made.append(sequence_of(number, prompt, max_tokens=int(rng.integers(1, 20))))
    return made, rng


def alone(engine, sequence_of, sequences):
    """The tokens of each sequence when nobody else runs."""
    tokens = []
    for s in sequences:
        one = sequence_of(s.request, s.prompt, max_tokens=s.params.max_tokens)
        drive(engine, [(0, one)])
        tokens.append(one.output)
    return tokens
