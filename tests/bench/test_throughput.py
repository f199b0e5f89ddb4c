"""Throughput figures: which repeats count, how long a window is, what is asked of the engine.

The engine is a clock here: a real one would be timed, and a test never is.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer_jax.bench.throughput import WARM_UPS, WINDOW_S, Lengths, measure
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import RequestOutput

LENGTHS = Lengths((5, 9), (2, 4))
ERROR = RequestError("It failed.", "It had to.", "Do not.")


class Clocked:
    """Takes 0.1 s a request, half of it for the device; call n compiles for `compiles[n]` s."""

    def __init__(self, compiles=(), fails=None):
        self.config = SimpleNamespace(vocab_size=20, image_token_id=7)
        self._meter, self.now, self.calls = Meter(), 0.0, []
        self.compiles, self.fails = list(compiles), fails

    @property
    def meter(self):
        return dataclasses.replace(self._meter)

    def generate(self, prompts, params, ids, tell):
        assert prompts is None
        self.calls.append((ids, [p.max_tokens for p in params]))
        number = len(self.calls) - 1
        late = self.compiles[number] if number < len(self.compiles) else 0.0
        meter, count = self._meter, len(ids)
        meter.compile_s += late
        meter.prompt_tokens += sum(map(len, ids))
        meter.output_tokens += sum(p.max_tokens for p in params)
        meter.steps += 2 * count
        meter.wait_s += 0.05 * count
        self.now += 0.1 * count + late
        tell(count, count)
        error = ERROR if number == self.fails else None
        return [RequestOutput(request_id="r", prompt=None, prompt_token_ids=(1,), error=error)]


def measured(engine, **asked):
    defaults = {"requests": 4, "least": 3, "repeats": 3, "seed": 1}
    return measure(engine, LENGTHS, clock=lambda: engine.now, **(defaults | asked))


def test_figures_follow_from_counts_and_seconds():
    engine = Clocked()
    made = measured(engine)
    assert made["requests"] == 4 and made["warm_up"] == {"passes": 1, "compile_s": 0.0}
    assert made["valid"] == len(made["repeats"]) == 3
    (ids, outputs), row = engine.calls[1], made["repeats"][0]
    assert row["wall_s"] == pytest.approx(0.4)
    assert row["output_tokens_s"] == pytest.approx(sum(outputs) / 0.4)
    assert row["prompt_tokens_s"] == pytest.approx(sum(map(len, ids)) / 0.4)
    assert row["wait_share"] == pytest.approx(0.5)
    assert (row["steps"], row["host_us_step"]) == (8, pytest.approx(25_000))
    assert made["median"]["output_tokens_s"] == pytest.approx(row["output_tokens_s"])


def test_a_repeat_that_compiled_is_kept_marked_and_out_of_the_median():
    # Call 0 warms up; call 2 is the second repeat.
    made = measured(Clocked(compiles=[0, 0, 5.0]))
    assert [row["valid"] for row in made["repeats"]] == [True, False, True]
    assert made["repeats"][1]["compile_s"] == 5.0 and made["valid"] == 2
    assert made["median"]["wall_s"] == pytest.approx(0.4)
    assert made["spread"]["wall_s"] == [pytest.approx(0.4)] * 2


def test_without_a_valid_repeat_there_is_no_median():
    made = measured(Clocked(compiles=[0, 1.0]), repeats=1)
    assert (made["valid"], made["median"], made["spread"]) == (0, None, None)


def test_the_warm_up_goes_on_until_nothing_is_compiled():
    engine = Clocked(compiles=[3.0, 1.0])
    made = measured(engine)
    assert made["warm_up"] == {"passes": 3, "compile_s": 4.0} and made["valid"] == 3
    made = measured(Clocked(compiles=[1.0] * 99))
    assert made["warm_up"]["passes"] == WARM_UPS and made["valid"] == 0


def test_without_a_number_of_requests_a_window_is_long_enough():
    engine = Clocked(compiles=[3.0])
    made = measured(engine, requests=None)
    assert made["requests"] > 3
    assert all(row["wall_s"] >= WINDOW_S for row in made["repeats"])
    # Once short and compiling, once short, then as long as a repeat.
    assert [len(ids) for ids, _ in engine.calls[:3]] == [3, 3, made["requests"]]


def test_repeats_have_the_same_lengths_and_prompts_of_their_own():
    engine = Clocked()
    measured(engine, seed=5)
    shapes = {(tuple(map(len, ids)), tuple(outputs)) for ids, outputs in engine.calls}
    assert len(shapes) == 1
    prompts = [tuple(prompt) for ids, _ in engine.calls for prompt in ids]
    assert len(set(prompts)) == len(prompts)
    tokens = {token for prompt in prompts for token in prompt}
    assert min(tokens) >= 3 and max(tokens) < 20 and 7 not in tokens
    again = Clocked()
    measured(again, seed=5)
    assert again.calls == engine.calls


def test_lengths_are_inclusive_and_grow_from_their_beginning():
    drawn = LENGTHS.draw(0, 200)
    assert {n for n, _ in drawn} == set(range(5, 10)) and {m for _, m in drawn} == {2, 3, 4}
    assert drawn[:50] == LENGTHS.draw(0, 50) != LENGTHS.draw(1, 50)


def test_static_batches_end_before_the_next_begins():
    engine, told = Clocked(), []
    measured(engine, requests=5, group=2, repeats=1, tell=lambda *call: told.append(call))
    assert [len(ids) for ids, _ in engine.calls] == [2, 2, 1] * 2
    assert told[:4] == [("warm-up", n, 5) for n in (0, 2, 4, 5)]
    assert told[-1] == ("repeat 1", 5, 5)


@pytest.mark.parametrize("fails", [0, 2])
def test_a_request_that_failed_is_raised_and_not_measured(fails):
    with pytest.raises(RequestError, match="It failed"):
        measured(Clocked(fails=fails))


def test_lengths_on_a_log_scale_are_mostly_short_and_stay_between_their_ends():
    drawn = np.array(Lengths((16, 32), (8, 1024), "log").draw(0, 4000))
    assert drawn.min(0).tolist() == [16, 8] and drawn[:, 0].max() == 32
    assert 1000 < drawn[:, 1].max() <= 1024
    assert 80 < np.median(drawn[:, 1]) < 102  # the middle of the ends' logarithms is 91
