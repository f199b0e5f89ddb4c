"""Drafts in the engine, whoever proposes them: the tokens are those of decoding without."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from short_engine import LIMITS, check_empty, drive, few_pages
from short_llm import fewer_sizes, largest

from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.runner import step
from deepinfer_jax.runner.compile import keep_compiled

PROMPT = np.random.default_rng(5).integers(3, 250, 110)
DRAFTS = 5
LONGEST = 150
GREEDY, SEEDED = 0.0, 0.8


@pytest.fixture(scope="module")
def truth(plain, sequence_of):
    """Temperature -> what is drawn without drafts."""
    made = {t: sequence_of(0, PROMPT, max_tokens=LONGEST, temperature=t) for t in (GREEDY, SEEDED)}
    drive(plain, [(0, one) for one in made.values()])
    return {temperature: one.output for temperature, one in made.items()}


@pytest.fixture(scope="module")
def engine_with(llm, truth, tmp_path_factory):
    """Engines whose drafter is right in slot 0, wrong in slot 1, and at times right elsewhere."""
    net, kept = llm.assembled, keep_compiled(tmp_path_factory.mktemp("programs"))
    known = jnp.asarray([[*PROMPT, *truth[t], 0] for t in (GREEDY, SEEDED)], jnp.int32)

    def propose(params, state, plan, emitted, taps, **options):
        del params, plan, emitted, taps, options
        slots, width = state.drafts.token.shape
        slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
        at = jnp.minimum(state.length, known.shape[1] - 1)
        which = jnp.where(known[0, at] == state.token, 0, 1)
        position = state.length[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)
        token = known[which[:, None], jnp.minimum(position, known.shape[1] - 1)]
        wrong = (slot == 1) | ((slot > 1) & ((position * 7 + slot * 3) % 5 == 0))
        token = jnp.where(wrong, (token + 1) % 250, token)
        return state.replace(drafts=state.drafts.replace(token=token))

    def made(**options):
        limits = dataclasses.replace(LIMITS, drafts=DRAFTS)
        with fewer_sizes(largest):
            return Engine(net.network, net.params, net.mesh, limits=limits, kept=kept, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "propose", propose)
        yield made


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_drafts_change_no_token(truth, engine_with, sequence_of, overlap):
    engine = engine_with(overlap=overlap)
    lengths = [LONGEST, LONGEST, LONGEST, 1, 2, 3, 4, 5, 6, 7, 30, 31, 64, 65, 90, 100]
    temperatures = [GREEDY, SEEDED] * 8
    sequences = [
        sequence_of(0, PROMPT, max_tokens=n, temperature=t)
        for n, t in zip(lengths, temperatures, strict=True)
    ]
    drive(engine, [(2 * i, s) for i, s in enumerate(sequences)])
    for sequence, length, temperature in zip(sequences, lengths, temperatures, strict=True):
        assert sequence.output == truth[temperature][:length], length
        assert sequence.finish_reason == "length"
    right, wrong, some = sequences[:3]
    assert right.accepted > 0.75 * LONGEST and right.accepted >= right.drafted - DRAFTS
    assert wrong.accepted == 0 and wrong.drafted > 4 * LONGEST
    assert 0.3 * LONGEST < some.accepted < right.accepted
    assert engine.meter.drafted == sum(s.drafted for s in sequences)
    assert engine.meter.accepted == sum(s.accepted for s in sequences)


def test_sequences_that_give_up_their_pages_go_on_with_drafts(truth, engine_with, sequence_of):
    engine = few_pages(engine_with(host_pages=2), 3)
    sequences = [sequence_of(0, PROMPT, max_tokens=LONGEST, temperature=SEEDED) for _ in range(3)]
    drive(engine, [(0, s) for s in sequences])
    assert [s.output for s in sequences] == [truth[SEEDED]] * 3
    assert engine.meter.preempted


def test_a_stop_inside_the_drafts_ends_the_sequence_there(truth, engine_with, sequence_of):
    stop = truth[SEEDED][10]
    first = truth[SEEDED].index(stop)
    engine = engine_with()
    one = sequence_of(
        0, PROMPT, max_tokens=LONGEST, temperature=SEEDED, stop_token_ids=(stop,), ignore_eos=True
    )
    drive(engine, [(0, one)])
    assert one.output == truth[SEEDED][: first + 1] and one.finish_reason == "stop"
    check_empty(engine)
