"""The decode benchmark: what it refuses; a run of it compiles nano, so there is none here."""

import pytest

from deepinfer_jax.bench.decode import main, measure, prefill
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import RequestOutput


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "argument --tokens: 1 is below 2"),
        (["--prompt", "0"], "argument --prompt: 0 is below 1"),
        (["--batches", "4,0"], "argument --batches: 0 is below 1"),
        (["--batches", "4,"], "argument --batches: invalid"),
    ],
)
def test_sizes_that_cannot_be_timed_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


class Timed:
    """An engine that takes two seconds for a prefill, and fails from call `fails` on."""

    def __init__(self, fails=99):
        self.meter, self.calls, self.fails = Meter(), 0, fails

    def generate(self, prompts, params):
        del params
        self.calls += 1
        self.meter.prefill_s += 2.0
        error = RequestError("It failed.", "It had to.", "Do not.")
        bad = self.calls >= self.fails
        return [RequestOutput(request_id="r", prompt=None, prompt_token_ids=(1,),
                              error=error if bad else None) for _ in prompts]  # fmt: skip


def test_a_prefill_is_timed_by_the_engines_own_meter():
    assert prefill(Timed(), 100) == 50


@pytest.mark.parametrize("fails", [1, 3])
def test_a_request_that_failed_is_raised_and_not_timed(fails):
    with pytest.raises(RequestError, match="It failed"):
        prefill(Timed(fails), 100)


def test_a_decode_that_failed_is_raised():
    with pytest.raises(RequestError, match="It failed"):
        measure(Timed(1), 4, 8)
