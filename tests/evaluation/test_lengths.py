import pytest

from deepinfer_jax.errors import RequestError
from deepinfer_jax.evaluation.lengths import Fitter

LONG = (0, *range(10, 19))  # ten tokens, BOS first


def test_what_fits_stays():
    fitter = Fitter(12, 0)
    assert fitter.fit([(LONG, 2), ((5,), 1)]) == [LONG, (5,)] and fitter.count == 0


def test_what_is_too_long_is_refused_before_anything_is_cut():
    with pytest.raises(RequestError) as caught:
        Fitter(12, 0).fit([(LONG, 2), (LONG, 3), (LONG, 5)])
    assert str(caught.value) == (
        "2 of 3 requests are longer than max_model_len 12, the longest by 3 tokens. Nothing was "
        "truncated: what is left of a prompt is another question. Raise max_model_len if the model "
        "allows it, lower max_gen_toks, or cut prompts with truncate=left."
    )


def test_a_prompt_is_cut_at_its_left_end_behind_bos_and_counted():
    fitter = Fitter(12, 0, truncate=True)
    assert fitter.fit([(LONG, 2), (LONG, 4), (LONG[1:], 4)]) == [
        LONG,
        (0, *LONG[3:]),
        LONG[2:],
    ]
    assert fitter.count == 2
    assert fitter.fit([(LONG, 11)]) == [(0,)]
    with pytest.raises(RequestError, match="^1 of 1 requests are longer than max_model_len 12"):
        fitter.fit([(LONG, 12)])
