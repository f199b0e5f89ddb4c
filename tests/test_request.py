import dataclasses

import numpy as np
import pytest

from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs, ToolCall


def test_a_result_carries_a_failure_beside_its_outputs():
    output = CompletionOutput(index=0, text="a", token_ids=(1,), finish_reason="stop")
    error = RequestError("What.", "Why.", "Do.")
    result = RequestOutput(
        request_id="7", prompt=None, prompt_token_ids=(0, 1), outputs=(output,), error=error
    )
    assert result.error is error and not result.finished
    assert dict(result.metrics) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.finished = True  # type: ignore[misc]


def part(index, text="", **more):
    tokens = tuple(range(len(text)))
    return CompletionOutput(index=index, text=text, token_ids=tokens, **more)


def test_the_parts_of_a_stream_join_sample_by_sample():
    def streamed(*outputs, **more):
        return RequestOutput(
            request_id="3", prompt="p", prompt_token_ids=(0,), outputs=outputs, **more
        )

    def logprobs(*values):
        column = np.array(values, np.float32)
        return TokenLogprobs(
            token=column, top_ids=column[:, None].astype(np.int32), top=-column[:, None]
        )

    parts = [
        streamed(part(1, "b", reasoning="x", logprobs=logprobs(-1))),
        streamed(
            part(0, "a", tool_calls=(ToolCall("f", "{"),)),
            part(1, "c", reasoning="", logprobs=logprobs(-2), finish_reason="length"),
        ),
        streamed(
            part(0, "", tool_calls=(ToolCall("", "}"), ToolCall("g", "", 1)), finish_reason="stop"),
            finished=True,
            metrics={"time_to_first_token_s": 1.0},
        ),
    ]
    whole = RequestOutput.join(iter(parts))
    assert whole.finished and whole.metrics == {"time_to_first_token_s": 1.0}
    first, second = whole.outputs
    assert first == part(
        0, "a", tool_calls=(ToolCall("f", "{}"), ToolCall("g", "", 1)), finish_reason="stop"
    )
    assert (second.text, second.reasoning, second.finish_reason) == ("bc", "x", "length")
    assert second.token_ids == (0, 0)
    assert second.logprobs.token.tolist() == [-1, -2]
    assert second.logprobs.top_ids.tolist() == [[-1], [-2]]
    assert second.logprobs.top.tolist() == [[1], [2]]
