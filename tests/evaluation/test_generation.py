import itertools

import pytest

from deepinfer_jax.errors import RequestError
from deepinfer_jax.evaluation.generation import cut, parameters, seed_of


def made(**asked):
    return parameters(asked, most=256, seed=7)


def test_every_generation_of_a_run_has_a_seed_of_its_own():
    cases = itertools.product((0, 42), ("gsm8k", "mmlu"), range(4), range(3))
    seeds = [seed_of(*case) for case in cases]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**64 for s in seeds)
    # The rule is written into results, so it must stay what it is.
    assert seed_of(42, "gsm8k", 3, 1) == 7258342607759015872


def test_do_sample_decides_and_a_temperature_stands_for_it():
    assert made().temperature == 0
    assert made(temperature=0.7).temperature == 0.7
    assert made(do_sample=False, temperature=0.7).temperature == 0
    assert made(do_sample=True).temperature == 1
    assert made(do_sample=True, temperature=0.0).temperature == 0
    assert made(do_sample=True, temperature=0.5, top_p=0.9, top_k=5).top_k == 5


def test_limits_stops_and_seeds_are_taken_over():
    params = made(until=["\n\n", "", "Q:"], max_gen_toks=12)
    assert (params.stop, params.max_tokens, params.seq_seed) == (("\n\n", "Q:"), 12, 7)
    assert made(until="\n").stop == ("\n",)
    assert made(until=None).stop == () and made().max_tokens == 256
    assert made(max_new_tokens=3).max_tokens == made(max_tokens=3).max_tokens == 3
    assert made(seq_seed=9).seq_seed == 9
    assert made(num_beams=1, repetition_penalty=1.0) == made()


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(RequestError, match="limited by max_gen_toks=3, max_tokens=4. All of them"):
        made(max_gen_toks=3, max_tokens=4)
    with pytest.raises(RequestError, match="repetition_penalty=1.2"):
        made(repetition_penalty=1.2)
    with pytest.raises(RequestError, match="unknown keyword 'num_beams'"):
        made(num_beams=4)


def test_a_text_is_cut_at_its_first_stop_string():
    assert cut("a b\nc", ("\n", "b")) == "a "
    assert cut("a b", ()) == cut("a b", ("x",)) == "a b"
