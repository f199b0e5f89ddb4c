"""Bad rows of a data set fail alone, in their places (case: one prompt too long, all lost)."""

import numpy as np
import pytest
from short_llm import LIMIT, open_llm

from deepinfer_jax import SamplingParams
from deepinfer_jax.errors import ConfigError, RequestError

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BAD = {
    0: [5] * (LIMIT + 1),
    4: [5] * (LIMIT - 3),
    5: [],
    6: [0, 7, 1 << 20],
    9: [5] * 3 * LIMIT,
}
TOO_LONG = (0, 4, 9)


def rows():
    rng = np.random.default_rng(0)
    good = [rng.integers(3, 259, int(n)).tolist() for n in rng.integers(1, 40, 10)]
    return [BAD.get(i, ids) for i, ids in enumerate(good)]


def test_ten_rows_give_ten_results_and_the_good_ones_are_those_of_a_run_without_the_bad(llm):
    prompts = rows()
    outputs = llm.generate(prompts, PARAMS)
    assert [o.request_id for o in outputs] == [str(i) for i in range(10)]
    assert {i for i, o in enumerate(outputs) if o.error is not None} == set(BAD)
    for i, output in enumerate(outputs):
        assert output.finished and (output.outputs == ()) == (i in BAD)
        assert list(output.prompt_token_ids) == prompts[i], "nothing is truncated"
    for i in TOO_LONG:
        error = outputs[i].error
        assert isinstance(error, RequestError)
        numbers = f"prompt {len(BAD[i])} + max_tokens 4 exceeds max_model_len {LIMIT}."
        assert error.what == f"Request {i}: {numbers}"
    assert "empty prompt" in outputs[5].error.what
    assert "token id 1048576" in outputs[6].error.what
    alone = llm.generate([ids for i, ids in enumerate(prompts) if i not in BAD], PARAMS)
    good = [o.outputs[0].token_ids for o in outputs if o.error is None]
    assert good == [o.outputs[0].token_ids for o in alone]
    assert len(good[0]) == 4


def test_cutting_prompts_is_a_setting_of_the_engine_and_in_its_manifest(short_folder, compiled):
    llm = open_llm(short_folder, compiled, truncate="left")
    rows = {row["key"]: row for row in llm.manifest()["settings"]}
    assert rows["engine.truncate"]["value"] == "left"
    # Without room for a single token of the prompt nothing is cut, and no cut is advised.
    (output,) = llm.generate([[5] * LIMIT], SamplingParams(max_tokens=LIMIT))
    assert output.error is not None and output.error.do == f"Shorten it to {LIMIT - 1}."
    with pytest.raises(ConfigError, match="engine.truncate is 'middle'"):
        open_llm(short_folder, compiled, truncate="middle")
