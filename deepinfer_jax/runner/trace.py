"""A forward that shows its inside: every array of a prefill, or logits and selections of a decode.

Array names and shapes are those of the reference data: `L{l}.x` belongs to layer l; float arrays
come out as float32.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import RequestError
from deepinfer_jax.model.cache import Cache, init_cache
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.streams import Residual
from deepinfer_jax.model.transformer import ForwardOut, Injected, Network
from deepinfer_jax.runner.compile import replicated, trace_program
from deepinfer_jax.runner.step import pack_rows

Arrays = dict[str, np.ndarray]
Memory = Callable[[np.ndarray, int, int], tuple[np.ndarray, ...]]
_PER_ENTRY = ("latent", "compress_kv", "index_k")
_ENGRAM = ("engram_rows", "engram_gate", "engram_out")
_RESIDUAL = re.compile(r"L(0|[1-9][0-9]*)\.(stream|pre_next)")


@dataclass(frozen=True)
class TraceInput:
    """What a trace runs on.

    Attributes:
        token_ids: int [1, t].
        prefill_len: prompt length; the rest is decoded token by token. None traces a prefill.
        injected: by layer l, what leaves it: stream [1, t, s, d] and pre [1, t, s], for layer
            l + 1; those of the last layer are not used.
        alone: names of residuals that came without their other half; they are not injected.
    """

    token_ids: np.ndarray
    prefill_len: int | None
    injected: Mapping[int, tuple[np.ndarray, np.ndarray]]
    alone: tuple[str, ...] = ()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], vocab_size: int) -> "TraceInput":
        """Read `token_ids`, optional `prefill_len`, `L{l}.stream` and `L{l}.pre_next`.

        Other arrays are not read, so a trace can be the input of the next. Raises RequestError
        when the ids are missing, of a wrong shape or outside the vocabulary. What depends on the
        network is for `check`.
        """
        if "token_ids" not in arrays:
            raise RequestError(
                f"The input has no array token_ids; it has {', '.join(arrays) or 'none'}.",
                "A trace runs on token ids.",
                "Add token_ids, integers of shape [1, tokens].",
            )
        ids = np.asarray(arrays["token_ids"])
        if ids.dtype.kind not in "iu" or ids.ndim != 2 or ids.shape[0] != 1 or not ids.size:
            raise RequestError(
                f"token_ids is {ids.dtype} of shape {list(ids.shape)}.",
                "A trace runs one sequence of integers.",
                "Give integers of shape [1, tokens] with at least one token.",
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise RequestError(
                f"token_ids spans {ids.min()} to {ids.max()}; the vocabulary has {vocab_size} ids.",
                "An id outside the vocabulary has no embedding.",
                f"Use ids from 0 to {vocab_size - 1}.",
            )
        prefill = None
        if "prefill_len" in arrays:
            length = np.asarray(arrays["prefill_len"])
            if length.shape != () or length.dtype.kind not in "iu":
                raise RequestError(
                    f"prefill_len is {length.dtype} of shape {list(length.shape)}.",
                    "It is one number of tokens.",
                    "Give one integer.",
                )
            prefill = int(length)
        if prefill is not None and not 0 < prefill <= ids.shape[1]:
            raise RequestError(
                f"prefill_len is {prefill} for {ids.shape[1]} tokens.",
                "The prompt is the first part of token_ids.",
                f"Give a length from 1 to {ids.shape[1]}.",
            )
        found = [m for name in arrays if (m := _RESIDUAL.fullmatch(name))]
        kinds = {int(m[1]): {n[2] for n in found if n[1] == m[1]} for m in found}
        injected = {
            layer: (arrays[f"L{layer}.stream"], arrays[f"L{layer}.pre_next"])
            for layer in sorted(kinds)
            if len(kinds[layer]) == 2
        }
        alone = tuple(m[0] for m in found if len(kinds[int(m[1])]) < 2)
        if injected and prefill not in (None, ids.shape[1]):
            raise RequestError(
                f"The input has residuals of {len(injected)} layers and prefill_len {prefill}.",
                "Residuals replace those of a prefill; a decode computes its own.",
                "Leave out either of them.",
            )
        return cls(ids, prefill, injected, alone)

    def check(self, config: ModelConfig, positions: int) -> None:
        """Refuse what a network of `config`, built for `positions` tokens, cannot run on.

        Raises RequestError when the sequence is too long, and for a residual of a layer that does
        not exist or of another shape.
        """
        tokens, layers = self.token_ids.shape[1], config.num_hidden_layers
        if tokens > positions:
            raise RequestError(
                f"The input has {tokens} tokens; the network was built for {positions} positions.",
                "Nothing is truncated.",
                f"Shorten token_ids to {positions}, or raise engine.max_model_len.",
            )
        wanted = (1, tokens, config.hc_mult, config.hidden_size)
        for layer, (stream, pre) in self.injected.items():
            if layer >= layers:
                raise RequestError(
                    f"The input has L{layer}.stream, and the network {layers} layers.",
                    f"Its layers are L0 to L{layers - 1}.",
                    f"Leave out L{layer}.stream and L{layer}.pre_next.",
                )
            parts = ((f"L{layer}.stream", stream, wanted), (f"L{layer}.pre_next", pre, wanted[:3]))
            for name, value, shape in parts:
                if value.shape != shape or value.dtype.kind != "f":
                    raise RequestError(
                        f"{name} is {value.dtype} of shape {list(value.shape)}.",
                        f"For {tokens} tokens this network's is of shape {list(shape)}.",
                        "Give floats of that shape.",
                    )


def _host(array: jax.Array) -> np.ndarray:
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    return np.asarray(array.astype(jnp.float32) if floats else array)


def _injected(given: TraceInput, net: Network) -> Injected | None:
    c, t = net.config, given.token_ids.shape[1]
    entered = [layer + 1 for layer in given.injected if layer + 1 < c.num_hidden_layers]
    if not entered:
        return None
    streams: Any = np.zeros((c.num_hidden_layers, t, c.hc_mult, c.hidden_size), np.float32)
    pre: Any = np.zeros((c.num_hidden_layers, t, c.hc_mult), np.float32)
    for layer in entered:
        stream, mix = given.injected[layer - 1]
        streams[layer], pre[layer] = stream[0], mix[0]
    known: Any = np.isin(np.arange(c.num_hidden_layers), entered)
    return Injected(known, Residual(streams.astype(net.arithmetic.dtype), pre))


def _named(out: ForwardOut, logits: jax.Array, given: TraceInput, net: Network) -> Arrays:
    """A prefill's arrays with the names and shapes of the reference data."""
    ratios, t = net.config.compress_ratios, given.token_ids.shape[1]
    raw = {name: _host(value) for name, value in out.trace.items()}
    named: Arrays = {}
    for name, value in raw.items():
        layer, _, kind = name.rpartition(".")
        ratio = ratios[int(layer[1:])] if layer else 0
        if kind in _ENGRAM:
            continue
        if kind in _PER_ENTRY:
            value = value[ratio - 1 :: ratio]
        if kind == "candidates":
            value = value[:, : t // ratio]
        named[name] = value if kind.startswith("route") else value[None]
    for kind in _ENGRAM:
        parts = [raw[f"L{layer}.{kind}"] for layer in net.config.engram_layer_ids]
        if parts:
            named[kind] = np.concatenate(parts)[None]
    if out.taps.shape[0]:
        named["main_hidden"] = np.concatenate(list(_host(out.taps)), -1)[None]
    named["final_hidden"] = _host(out.hidden)[None]
    named["logits"] = _host(logits)[None]
    named["token_ids"] = given.token_ids.astype(np.int32)
    return named


def run_trace(
    params: Params, given: TraceInput, net: Network, mesh: Mesh, memory: Memory | None = None
) -> Arrays:
    """Trace `given`. Raises RequestError where `given.check` does.

    Args:
        params: the network's weights.
        given: tokens and options.
        net: with `traced` set.
        mesh: where to run.
        memory: function (ids, start, stop) -> Engram rows of those positions, when the tables are
            not on the device.

    Returns:
        Of a prefill all arrays. Of a decode `logits` [1, t - p + 1, v], after the prompt and after
        each token, and `L{l}.topk` [1, t - p, k] of every token-by-token step.
    """
    given.check(net.config, params.rope_plain.shape[0])
    run = trace_program(net, mesh)
    t = given.token_ids.shape[1]
    prompt = given.prefill_len or t
    place = replicated(mesh)
    cache = jax.device_put(init_cache(net.config, net.arithmetic, slots=1, positions=t), place)

    def go(cache: Cache, start: int, stop: int, injected: Injected | None) -> Any:
        ids = given.token_ids[0]
        rows = pack_rows([(ids[start:stop], start, 0)], stop - start)
        looked_up = None if memory is None else memory(ids, start, stop)
        sent = jax.device_put((rows, looked_up, injected), place)
        return run(params, cache, *sent)

    out, logits = go(cache, 0, prompt, _injected(given, net) if prompt == t else None)
    if given.prefill_len is None:
        return _named(out, logits, given, net)
    all_logits = [_host(logits[-1:])]
    picked: dict[str, list[np.ndarray]] = {n: [] for n in out.trace if n.endswith(".topk")}
    for position in range(prompt, t):
        out, logits = go(out.cache, position, position + 1, None)
        all_logits.append(_host(logits))
        for name, rows in picked.items():
            rows.append(_host(out.trace[name]))
    named = {name: np.concatenate(rows)[None] for name, rows in picked.items() if rows}
    named["logits"] = np.concatenate(all_logits)[None]
    named["token_ids"] = given.token_ids.astype(np.int32)
    named["prefill_len"] = np.asarray(prompt, np.int32)
    return named
