"""`deepinfer demo`: three prompts answered by nano, and a short table of what that took."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.answers import Transcript, keeping
from deepinfer_jax.entrypoints.engine_options import Model, open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import completion_json, console, json_text
from deepinfer_jax.llm import LLM
from deepinfer_jax.model.cache import kv_bytes_per_token
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.skills import facts, lookup
from deepinfer_jax.skills.conversation import prompt
from deepinfer_jax.skills.evaluation import distance
from deepinfer_jax.skills.families import sample as draw_sample
from deepinfer_jax.skills.sample import HELD_OUT_SEED, Sample
from deepinfer_jax.text.tokenizer import Tokenizer

_CHUNK = 128  # prompt rows of one step
_LOOKUP = 1  # index of a document with about 1900 tokens and its needle near the beginning


@dataclass(frozen=True)
class Shown:
    """One prompt of the demo: its title, the sample it is taken from, and its longest answer."""

    title: str
    sample: Sample
    max_tokens: int


def command(
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    out: options.Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Answer a question, work out a sum and find a sentence in a long document."""
    screen = console()
    with Live(quiet) as live:
        # One small prompt program instead of two: the first start spends its time compiling.
        llm = open_engine(
            live,
            model=model,
            config=config,
            overrides=overrides,
            max_num_batched_tokens=_CHUNK,
            max_num_seqs=1,
        )
        shown = prompts()
        live.doing("compiling")
        llm.prepare(len(llm.tokenizer.encode_pieces(prompt(one.sample).pieces)) for one in shown)
        before = dataclasses.replace(llm.meter)
        outputs = []
        with keeping(out, llm) as keep:
            for number, one in enumerate(shown):
                if not as_json:
                    live.clear()
                    _introduce(one, llm.tokenizer, screen)
                output = _answer(llm, one, live, None if as_json else screen)
                keep(dataclasses.replace(output, request_id=f"{number}"))
                outputs.append(output)
    totals = summary(llm, before, outputs, shown)
    if as_json:
        answers = [
            {"title": one.title, "expected": one.sample.answer, **completion_json(o.outputs[0])}
            for one, o in zip(shown, outputs, strict=True)
        ]
        print(json_text({"answers": answers, **totals}))
    else:
        _show(totals, screen)
    return 0


def prompts() -> tuple[Shown, ...]:
    """The three prompts; the sum and the document are held out from training."""
    rng = np.random.default_rng((HELD_OUT_SEED, _LOOKUP))
    return (
        Shown("A question about the engine", facts.question(0, "train", thinking=False), 64),
        Shown("A sum, with its reasoning", draw_sample("sum_worked", HELD_OUT_SEED, 0), 160),
        Shown(
            "A lookup in a long document",
            lookup.at_distance(rng, "code", 1500, 2000, longest=2060),
            24,
        ),
    )


def run_digest(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """First 16 hexadecimal digits of a SHA-256 over (prompt ids, output ids) of each request.

    Every list is its length and then its ids, as little-endian int32.
    """
    digest = hashlib.sha256()
    for request in requests:
        for ids in request:
            digest.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return digest.hexdigest()[:16]


def summary(
    llm: LLM, before: Meter, outputs: Sequence[RequestOutput], shown: Sequence[Shown]
) -> dict[str, Any]:
    """What the table says; durations in seconds, `before` is the meter when they began."""
    meter = llm.meter
    written = meter.output_tokens - before.output_tokens
    decode_s = meter.decode_s - before.decode_s
    # The first token of every answer comes from its prefill.
    decoded = written - len(outputs)
    pairs = zip(outputs, shown, strict=True)
    return {
        "right": sum(o.outputs[0].text == one.sample.answer for o, one in pairs),
        "prompt_tokens": meter.prompt_tokens - before.prompt_tokens,
        "output_tokens": written,
        "decode_tokens_per_s": decoded / decode_s if decode_s else None,
        "prefill_s": meter.prefill_s - before.prefill_s,
        "decode_s": decode_s,
        "compile_s": meter.compile_s,
        "parameters": sum(t.parameters for t in inventory(llm.config, drafter=False).values()),
        "kv_bytes_per_token": kv_bytes_per_token(llm.config),
        "run_digest": run_digest((o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs),
    }


def _introduce(one: Shown, tokenizer: Tokenizer, screen: Console) -> None:
    text = str(one.sample.messages[0]["content"])
    screen.out(f"\n{one.title}", style="bold", highlight=False)
    if one.sample.needle:
        document, _, text = text.rpartition("\n\n")
        size = len(tokenizer.encode(document, add_bos=False))
        far = distance(one.sample, tokenizer)
        screen.out(f"  document: {size} tokens", highlight=False)
        screen.out(
            f"  needle, {far} tokens before the answer: {one.sample.needle}", highlight=False
        )
    screen.out(f"> {text}", highlight=False)


def _answer(llm: LLM, one: Shown, live: Live, screen: Console | None) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=one.max_tokens)
    messages, sample = list(one.sample.messages[:-1]), one.sample
    transcript = None if screen is None else Transcript(screen)
    live.doing("reading the prompt")
    parts = []
    for part in llm.stream_chat(messages, params, thinking=sample.thinking):
        if part.error is not None:
            raise part.error
        parts.append(part)
        if transcript is not None:
            live.clear()
            transcript.show(part.outputs[0])
    output = RequestOutput.join(parts)
    if transcript is not None:
        transcript.end(output.outputs[0])
    if screen is not None and output.outputs[0].text != sample.answer:
        screen.out(f"  not the expected answer: {sample.answer}", highlight=False)
    return output


def _show(totals: dict[str, Any], screen: Console) -> None:
    speed = totals["decode_tokens_per_s"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    rows = {
        "right answers": f"{totals['right']} of 3",
        "prompt tokens": f"{totals['prompt_tokens']}",
        "output tokens": f"{totals['output_tokens']}",
        "decode": "no step" if speed is None else f"{speed:.1f} tokens/s",
        "seconds": f"prefill {totals['prefill_s']:.1f}, decode {totals['decode_s']:.1f}, "
        f"compiling {totals['compile_s']:.1f}",
        "parameters": f"{totals['parameters']:,}",
        "KV bytes a token": f"{totals['kv_bytes_per_token']:g} (in the release's formats)",
        "run digest": totals["run_digest"],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    screen.out("")
    screen.print(table)
