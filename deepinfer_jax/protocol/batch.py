"""Batch runs: the requests of a batch file to the engine, and result lines from its answers."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.protocol.ask import ApiRequest, Ask, Stamp
from deepinfer_jax.protocol.batch_file import BatchFile, Endpoint, Line
from deepinfer_jax.protocol.response import error_response, failure
from deepinfer_jax.protocol.result_file import id_of
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.text.tokenizer import Tokenizer

Answer = Callable[[Iterable[Ask]], Iterator[tuple[int, RequestOutput]]]
Result = dict[str, Any]


def answer_batch(
    batch: BatchFile,
    done: Collection[str],
    answer: Answer,
    tokenizer: Tokenizer,
    *,
    clock: Callable[[], float],
    fingerprint: str | None = None,
) -> Iterator[tuple[Result, Sequence[RequestOutput]]]:
    """Result lines of the lines that have none yet, bad ones first, others as they finish.

    Args:
        batch: the input.
        done: keys of lines that have their result.
        answer: the engine; requests are read from the file when it draws them.
        tokenizer: the engine's.
        clock: Unix time in seconds.
        fingerprint: `system_fingerprint` of the responses.

    Yields:
        A result line with the outputs that it was made of, none for a bad line.
    """
    todo = [line for line in batch.lines if line.key not in done]
    for line in todo:
        if line.error is not None:
            yield error_result(line, line.error), ()
    good = [line for line in todo if line.error is None]
    if not good:
        return
    begun: dict[int, tuple[ApiRequest, Endpoint]] = {}
    finished: dict[int, dict[int, RequestOutput]] = {}
    owners: list[tuple[int, int]] = []
    with batch.path.open("rb") as file:

        def asks() -> Iterator[Ask]:
            for place, line in enumerate(good):
                begun[place] = batch.request(file, line)
                for part, ask in enumerate(begun[place][0].asks):
                    owners.append((place, part))
                    yield dataclasses.replace(ask, name=line.custom_id or line.key)

        for index, output in answer(asks()):
            place, part = owners[index]
            parts = finished.setdefault(place, {})
            parts[part] = output
            request, endpoint = begun[place]
            if len(parts) < len(request.asks):
                continue
            del begun[place], finished[place]
            outputs = [parts[i] for i in range(len(parts))]
            line = good[place]
            error = failure(outputs)
            if error is not None:
                yield error_result(line, error), outputs
                continue
            stamp = Stamp(endpoint.id_prefix + line.key, int(clock()), fingerprint)
            body = endpoint.respond(request, outputs, tokenizer, stamp)
            yield _result(line, 200, body, None, outputs), outputs
    assert not begun, f"the engine left {len(begun)} requests without an output"


def error_result(line: Line, error: DeepInferError) -> Result:
    """The result line of a request that has no answer."""
    status, body = error_response(error)
    told = {"code": body["error"]["code"], "message": str(error)}
    if not line.is_request:
        return _result(line, None, None, told, ())
    return _result(line, status, body, told, ())


def request_digest(outputs: Sequence[RequestOutput]) -> str:
    """SHA-256 over prompt ids, output ids and log-probs if there are any, little-endian."""
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(np.asarray(output.prompt_token_ids, "<i4").tobytes())
        for sample in output.outputs:
            digest.update(np.asarray(sample.token_ids, "<i4").tobytes())
            if sample.logprobs is not None:
                digest.update(np.asarray(sample.logprobs.token, "<f4").tobytes())
    return digest.hexdigest()


def _result(
    line: Line,
    status: int | None,
    body: Mapping[str, Any] | None,
    error: Mapping[str, str] | None,
    outputs: Sequence[RequestOutput],
) -> Result:
    # A failed request has no tokens; its own name keeps it in the digest of the run.
    digest = hashlib.sha256(f"error {line.key}".encode()).hexdigest()
    samples = [sample for output in outputs for sample in output.outputs]
    if error is None:
        digest = request_digest(outputs)
    response = None
    if status is not None:
        response = {"status_code": status, "request_id": f"req_{line.key}", "body": body}
    return {
        "id": id_of(line.key),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
        # Beside the format's own members: what a rerun is compared with, and repeated from.
        "deepinfer": {
            "line": line.number,
            "digest": digest,
            "seq_seed": [sample.seq_seed for sample in samples],
            "truncated_tokens": sum(int(o.metrics.get("truncated_tokens", 0)) for o in outputs),
            "drafted": sum(sample.drafted for sample in samples),
            "accepted": sum(sample.accepted for sample in samples),
        },
    }
