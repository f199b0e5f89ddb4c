"""Which tokens have log-probs, seeded, against the public `deepseek-recipe` library."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from text.test_against_recipe import EXCLUDED, options_and_finish, output, their_chunks

from deepinfer_jax.protocol.logprobs import attribute
from deepinfer_jax.text.events import ParserOptions
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Tokenizer

recipe = pytest.importorskip("deepseek_recipe", minversion="0.2.0")


def their_tokens(
    options: ParserOptions, ids: list[int], finish: str, tokenizer: Any
) -> dict[str, list[float]]:
    """Kind -> log-probs of the library's entries; token k's log-prob is -k."""
    tokens = [recipe.InferenceChunk.tokens([i], [(-float(k), [])]) for k, i in enumerate(ids)]
    whole = recipe.ChatCompletionResponse("id", "m", 1, 0, 0)
    for made in their_chunks(options, tokens, finish, tokenizer, logprobs=True):
        whole.accumulate(made)
    found = json.loads(whole.to_json())["choices"][0]["logprobs"] or {}
    return {kind: [-e["logprob"] for e in entries] for kind, entries in found.items()}


def test_random_outputs_have_the_same_entries(release: Tokenizer, release_file: Path):
    tokenizer = recipe.Tokenizer.from_file(str(release_file))
    compared = 0
    for seed in range(400):
        rng = random.Random(20_000 + seed)
        options, finish = options_and_finish(rng)
        pieces = output(rng)
        if options.parse_json_output or EXCLUDED.search("".join(p.text for p in pieces)):
            continue
        ids = release.encode_pieces(pieces)
        ours: dict[str, list[float]] = {}
        for kind, place in attribute(ids, OutputParser(options, release), release):
            name = {"content": "content", "reasoning": "reasoning_content"}[kind]
            ours.setdefault(name, []).append(place)
        assert ours == their_tokens(options, ids, finish, tokenizer), (seed, options, pieces)
        compared += 1
    assert compared > 200
