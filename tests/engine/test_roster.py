"""The engine's books between plans, without a device."""

from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.engine.prefix import Provenance, Reuse, extend_keys, root_key
from deepinfer_jax.engine.roster import Roster
from deepinfer_jax.engine.sequence import Sequence

ROOT = root_key(b"test", b"")
LIMITS = Limits(
    slots=2, rows=16, pages=20, page=4, max_model_len=64, table_pages=16, updates=20, look_back=0
)


@pytest.fixture
def roster():
    return Roster(LIMITS, Meter(), eos=1, reuse=Reuse("exact", 4, ROOT))


def sequence(tokens, **params):
    text = SimpleNamespace(finish=lambda reason: None, whole=lambda: SimpleNamespace(tool_calls=()))
    prompt = np.asarray(tokens, np.int32)
    return Sequence(0, 0, prompt, SamplingParams(max_tokens=4, **params), 7, text)  # type: ignore[arg-type]


def published(roster, tokens):
    keys = extend_keys([], ROOT, tokens, page=4)
    pages = roster.pool.allocate(len(keys))
    for page, key, parent in zip(pages, keys, [ROOT, *keys], strict=False):
        roster.pool.publish(page, key, parent, Provenance())
    roster.pool.release(pages, 0)
    return tuple(pages)


def found(roster, number):
    return next(w for w in roster.view(1, 0).waiting if w.request == number)


def test_a_prefix_is_looked_up_for_those_that_may_be_admitted_now(roster):
    pages = published(roster, range(16))
    number = roster.add(sequence(range(18)), priority=0, deadline=np.inf)
    assert found(roster, number).pages == pages and found(roster, number).idle == 4


def test_pages_that_were_found_once_are_not_believed_later(roster):
    published(roster, range(16))
    number = roster.add(sequence(range(18)), priority=0, deadline=np.inf)
    assert found(roster, number).pages
    for _ in range(2):
        roster.add(sequence([9, 9, 9]), priority=-5, deadline=np.inf)
    # Two others come first now, and until it is its turn the pages may go to anybody.
    assert found(roster, number).pages == () and found(roster, number).idle == 0


def test_a_scored_prompt_takes_over_nothing_that_it_must_score(roster):
    published(roster, range(16))
    scored = sequence(range(18), prompt_logprobs=0)
    number = roster.add(scored, priority=0, deadline=np.inf)
    assert found(roster, number).pages == ()
    context = sequence(range(18), prompt_logprobs=0)
    context.score_after(13)
    number = roster.add(context, priority=-1, deadline=np.inf)
    assert len(found(roster, number).pages) == 3


def test_samples_wait_for_the_one_that_runs_their_prompt(roster):
    leader, follower = sequence(range(9)), sequence(range(9))
    follower.leader = leader
    first = roster.add(leader, priority=0, deadline=np.inf)
    second = roster.add(follower, priority=0, deadline=np.inf)
    assert roster.waiting == 2
    assert [w.request for w in roster.view(1, 0).waiting] == [first]
    roster.abort(first)
    assert {w.request for w in roster.view(1, 0).waiting} == {first, second}


def test_who_is_aborted_or_late_is_seen_at_any_place_of_the_queue(roster):
    numbers = [
        roster.add(sequence([5] * 3), priority=0, deadline=np.inf if i else 0.0) for i in range(400)
    ]
    roster.abort(numbers[399])
    seen = {w.request for w in roster.view(1, 0).waiting}
    assert {numbers[0], numbers[399]} <= seen and len(seen) < 300
