"""Continuations scored after contexts: pairs become requests that draw nothing of their own.

The tokens of a pair but its last are the prompt; the last one is forced in place of a draw, so a
pair takes no step besides those of its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.engine.admission import Admission, Request, as_ids
from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.request import Score
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Pair:
    """A context and a continuation on their way.

    Attributes:
        context: token ids, at least one.
        tokens: of the continuation.
        request: None where there is nothing to run.
        error: why it cannot be scored, or None.
    """

    context: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    request: Request | None = None
    error: DeepInferError | None = None

    def score(self) -> Score:
        """The result, once the request has ended."""
        error, values, greedy = self.error, np.zeros(0, np.float32), True
        if error is None and self.request is not None:
            error = self.request.output("raw").error
            if error is None:
                scores = self.request.samples[0].scores
                assert scores is not None and scores.complete
                values, greedy = scores.token, bool(scores.greedy.all())
        if error is not None:
            greedy = False
        return Score(
            logprob_sum=float("nan") if error else float(values.sum(dtype=np.float64)),
            logprobs=values,
            is_greedy=greedy,
            context_token_ids=self.context,
            token_ids=self.tokens,
            error=error,
        )


def admit_pairs(pairs: Sequence[Any], admission: Admission) -> list[Pair]:
    """One `Pair` each, in order; a bad one carries its error and never stops the others."""
    made = []
    for number, pair in enumerate(pairs):
        try:
            made.append(_admit(number, *encode_pair(number, pair, admission.tokenizer), admission))
        except DeepInferError as error:
            made.append(Pair(error=error))
    return made


def encode_pair(
    number: int, pair: Any, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a pair's context and continuation.

    Texts are encoded together, since tokens do not end where texts do: spaces at the end of the
    context go to the continuation, and so does a token that the two share. BOS stands before a
    text, once. Ids are taken as they are. An empty context, of either kind, is BOS alone.
    """
    if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise RequestError(
            f"Pair {number} is {_named(pair)}.",
            "What is scored is a continuation after a context.",
            "Pass (context, continuation), both as texts or both as token ids.",
        )
    context, continuation = pair
    if isinstance(context, str) and isinstance(continuation, str):
        # With its spelling in front, no text of a user's can be taken for the BOS.
        kept = spellings.BOS + context.removeprefix(spellings.BOS).rstrip()
        spaces = context[len(context.rstrip()) :]
        alone, whole = tokenizer.encode(kept), tokenizer.encode(kept + spaces + continuation)
        shared = next(
            (i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b),
            min(len(alone), len(whole)),
        )
        return tuple(whole[:shared]), tuple(whole[shared:])
    if isinstance(context, str) or isinstance(continuation, str):
        raise RequestError(
            f"Pair {number} mixes a text and token ids.",
            "Two texts are encoded together, and ids are taken as they are.",
            "Pass both as texts or both as token ids.",
        )
    ids = tuple(as_ids(number, context)) or (tokenizer.bos_id,)
    return ids, tuple(as_ids(number, continuation))


def _admit(
    number: int, context: tuple[int, ...], tokens: tuple[int, ...], admission: Admission
) -> Pair:
    if not tokens:
        admission.check(number, context, SamplingParams(max_tokens=1))
        return Pair(context, tokens)
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=0,
        golden_token_ids=tokens[-1:],
        seq_seed=0,
    )
    request = admission.of_ids(number, (*context, *tokens[:-1]), params)
    for sample in request.samples:
        # The row of the context's last token is the first whose next token is asked for.
        sample.score_after(len(context) - 1)
    return Pair(context, tokens, request)


def _named(pair: Any) -> str:
    size = f" of {len(pair)}" if isinstance(pair, Sequence) else ""
    return f"a {type(pair).__name__}{size}"
