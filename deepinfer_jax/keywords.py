"""The original engine's keywords of `LLM`, and what becomes of each one here.

A keyword is an engine field under another name, or describes something that is settled here. Of
the latter, the values that describe what happens anyway are accepted; any other is refused.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from deepinfer_jax.errors import ConfigError

# Parameters of `LLM` itself, so that a misspelt one meets its name.
_OWN = ("model", "tokenizer", "config", "overrides", "progress")
# The original's keyword whose None means its default.
_NONE_IS_DEFAULT = "max_num_batched_tokens"


class Settled(NamedTuple):
    """A keyword that sets nothing here.

    Attributes:
        accepted: the values that describe what happens anyway.
        why: why no other value can be honoured.
        do: what to do instead; empty to name the accepted values.
    """

    accepted: tuple[Any, ...]
    why: str
    do: str = ""


_LAYOUT = "One engine runs on one device; layouts over several are not built yet."
_ONE_PROCESS = "One process controls the engine, so there are no ranks to tell apart."
SETTLED: Mapping[str, Settled] = {
    "load_format": Settled(("auto",), "Weights are read from the checkpoint and never made up."),
    "trust_remote_code": Settled(
        (False,), "Only tokenizer.json is read; code of a checkpoint is never run."
    ),
    "served_model_name": Settled(("deepinfer-model",), "Nothing is served under a name."),
    "seed": Settled(
        (),
        "No draw depends on a seed of the process; every sequence has a seed of its own.",
        "Leave it out, and set seq_seed in SamplingParams.",
    ),
    # 0 leaves the size to the engine.
    "data_parallel_size": Settled((1, 0), _LAYOUT),
    "context_parallel_size": Settled((1,), _LAYOUT),
    "expert_parallel_size": Settled((1,), _LAYOUT),
    "engram_parallel_size": Settled((1, 0), _LAYOUT),
    "engine_rank": Settled((0,), _ONE_PROCESS),
    "engine_group_rank": Settled((0,), _ONE_PROCESS),
    "engine_type": Settled(
        ("NORMAL",), "Prefill and decode run in one engine and cannot be taken apart."
    ),
    "gpu_memory_utilization": Settled(
        (1, 1.0),
        "The cache has as many pages as are asked for, whatever memory is left.",
        "Leave it out, and set pages, or set max_num_seqs and max_model_len.",
    ),
    "chunked_prefill": Settled(
        (True,),
        "A prompt longer than max_num_batched_tokens is always read in chunks.",
        "Leave it out, or set max_num_batched_tokens to the longest prompt that is to stay whole.",
    ),
    "stop_preempted_request": Settled(
        (False,), "A sequence that gives up its pages is run again, and never ends for it."
    ),
    "tokens_per_block": Settled((-1, 128), "A page of the cache holds 128 tokens."),
    "lookahead_tokens": Settled((0,), "A chunk is scheduled however short it is."),
    "ignore_len": Settled((2**27,), "Prompts are bounded by max_model_len alone."),
    "disable_log_stats": Settled((True,), "There is no statistics line; LLM.meter has the counts."),
    "decode_sequence": Settled(
        (False,),
        "The result is one RequestOutput per prompt, never a bare text.",
        "Leave it out, and read outputs[0].text of each result.",
    ),
    "revision": Settled(
        (None,),
        "The revision of a repository is part of its name here.",
        "Leave it out, and name the model as owner/name@revision.",
    ),
    "tokenizer_revision": Settled(
        (None,),
        "The tokenizer is the model's own, or a file.",
        "Leave it out, and pass that revision's tokenizer.json as tokenizer.",
    ),
}


def translate(keywords: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The engine fields that `keywords` set.

    Args:
        keywords: the engine keywords that LLM was given.
        fields: names of the engine's fields.

    Raises:
        ConfigError: an unknown name, or a value that cannot be honoured.
    """
    unknown = [name for name in keywords if name not in (*fields, *SETTLED)]
    if unknown:
        legal = [*fields, *SETTLED, *_OWN]
        near = difflib.get_close_matches(unknown[0], legal, 1)
        raise ConfigError(
            f"LLM was given {len(unknown)} unknown keywords: {', '.join(unknown)}.",
            "A misspelt option that is ignored would leave its default in force.",
            f"Did you mean {near[0]}?" if near else f"The options are {', '.join(fields)}.",
        )
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in SETTLED:
            _check(name, value)
        elif name != _NONE_IS_DEFAULT or value is not None:
            values[name] = value
    return values


def _check(name: str, value: Any) -> None:
    # The original's engine type is an enumeration; its member's name is the text.
    plain = getattr(value, "name", value) if name == "engine_type" else value
    accepted, why, do = SETTLED[name]
    # 1 == True, so types are compared too.
    if not any(type(plain) is type(legal) and plain == legal for legal in accepted):
        named = " or ".join(map(repr, dict.fromkeys(accepted)))
        raise ConfigError(
            f"LLM was given {name}={value!r}, which cannot be honoured.",
            why,
            do or f"Leave it out, or pass {named}.",
        )
