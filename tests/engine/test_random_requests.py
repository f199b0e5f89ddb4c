"""Random requests in a random order of events: every loop writes what static batches write.

`pytest --requests 300 tests/engine/test_random_requests.py` runs so many, on nano as well.
"""

import numpy as np
import pytest
from short_engine import LIMITS, check_empty, few_pages

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.prefix import Reuse, root_key
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine_settings import limits_of
from deepinfer_jax.model.cache import pages_of
from deepinfer_jax.runner.compile import keep_compiled
from deepinfer_jax.text.output import PlainText

DEFAULT = 40


class Case:
    """A network with its limits, and random requests on it."""

    def __init__(self, llm, limits, kept, replay, count, longest):
        self.llm, self.limits, self.kept, self.longest = llm, limits, kept, longest
        self.reuse = Reuse("exact", replay, root_key(b"random", b""))
        rng = np.random.default_rng(count)
        vocab = min(llm.config.vocab_size, 3000)
        stem = rng.integers(3, vocab, longest)
        self.requests = []
        for number in range(count):
            length = int(np.exp(rng.uniform(0, np.log(longest))))  # as many short as long ones
            prompt = rng.integers(3, vocab, length)
            if number % 3 == 0:  # a beginning that others have too
                # Long enough that more of it can be taken over than has to be run again.
                shared = stem[: int(rng.integers(replay, longest) if number % 2 else longest // 3)]
                prompt = np.concatenate([shared, prompt])[:longest]
            # Some grow by several pages, for which none may be left.
            most = 24 if number % 2 else 300
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([1.0, 0.9])),
                max_tokens=int(rng.integers(1, most)),
                ignore_eos=True,
            )
            self.requests.append((number, prompt.astype(np.int32), params))
        self.arrivals = np.sort(rng.integers(0, 5 * count, count)).tolist()
        self.aborts = {int(n): int(rng.integers(1, 60)) for n in rng.permutation(count)[::15]}

    def engine(self, **options):
        net = self.llm.assembled
        return Engine(
            net.network, net.params, net.mesh, limits=self.limits, kept=self.kept, **options
        )

    def sequence(self, number, prompt, params):
        text = PlainText(self.llm.tokenizer, ())
        return Sequence(number, 0, prompt, params, 5000 + number, text)

    def static(self):
        """Groups that begin together, the next when the last of one has ended."""
        engine, made = self.engine(overlap=False), []
        for first in range(0, len(self.requests), self.limits.slots):
            group = [self.sequence(*r) for r in self.requests[first : first + self.limits.slots]]
            for _ in engine.run(group):
                pass
            made += group
        return [s.output for s in made]

    def arriving(self, engine):
        """Each at its time, some aborted a while later."""
        made = [self.sequence(*request) for request in self.requests]
        numbers: dict[int, int] = {}
        step = 0
        while engine.has_work or len(numbers) < len(made):
            for n in range(len(numbers), len(made)):
                if self.arrivals[n] > step and engine.has_work:
                    break
                numbers[n] = engine.add(made[n], priority=n % 3)
            for n, after in self.aborts.items():
                if n in numbers and self.arrivals[n] + after == step:
                    engine.abort(numbers[n])
            engine.step()
            step += 1
        check_empty(engine)
        return made


@pytest.fixture(scope="module", params=["short", "nano"])
def case(request, compiled):
    asked = request.config.getoption("--requests")
    if request.param == "short":
        llm = request.getfixturevalue("llm")
        return Case(llm, LIMITS, keep_compiled(compiled), 128, asked or DEFAULT, 600)
    if asked is None:
        pytest.skip("many requests on nano take minutes: pass --requests N")
    llm = LLM("nano")
    limits = limits_of(llm.plan(), llm.config)
    return Case(llm, limits, keep_compiled(compiled), 1280, asked, 3000)


@pytest.fixture(scope="module")
def expected(case):
    return case.static()


@pytest.mark.parametrize(
    ("overlap", "reuses", "few", "host_pages"),
    [
        (False, False, False, 0),
        (True, False, False, 0),
        (True, True, True, 0),
        (True, True, True, 4),
    ],
    ids=["plain", "overlapped", "reusing prefixes in few pages", "with pages on the host"],
)
def test_every_loop_writes_what_static_batches_write(
    case, expected, overlap, reuses, few, host_pages
):
    reuse = case.reuse if reuses else None
    engine = case.engine(overlap=overlap, reuse=reuse, host_pages=host_pages)
    if few:  # just enough for the longest
        few_pages(engine, pages_of(case.longest + 300))
    made = case.arriving(engine)
    for sequence, tokens in zip(made, expected, strict=True):
        if sequence.finish_reason == "abort":
            assert sequence.request in case.aborts
            tokens = tokens[: len(sequence.output)]
        assert sequence.output == tokens, f"request {sequence.request}"
    assert sum(s.finish_reason == "length" for s in made) >= len(made) - len(case.aborts)
    if reuses:
        assert engine.meter.cached_tokens and engine.meter.preempted
