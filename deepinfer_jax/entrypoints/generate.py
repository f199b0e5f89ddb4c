"""`deepinfer generate`: prompts in, texts out, in order."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.answers import Transcript, keeping
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import (
    Compile,
    Model,
    RecordStep,
    SeqSeed,
    TopK,
    TopP,
    Truncate,
    open_engine,
    record_steps,
)
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import as_json, console, is_truncated, json_text
from deepinfer_jax.entrypoints.watch import Requests, watching
from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.llm import LLM
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.sampling_params import SamplingParams


def command(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Texts; - reads standard input.")
    ],
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to write.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the likeliest token.")
    ] = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    seq_seed: SeqSeed = None,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text to stop before; repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Token to stop at; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end of sequence.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", help="Log-probs: the token's and the N likeliest."),
    ] = None,
    show_ids: Annotated[bool, typer.Option("--show-ids", help="Print token ids too.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's message.")
    ] = False,
    compile_ahead: Compile = None,
    metrics: Annotated[
        Path | None,
        typer.Option("--metrics", metavar="FILE.jsonl", help="File that gets a line a second."),
    ] = None,
    record_step: RecordStep = None,
    truncate: Truncate = None,
    out: options.Out = None,
    as_json_object: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Print the text that follows each prompt. Exits with 1 if some requests failed."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        n=n,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seq_seed=seq_seed,
    )
    texts = _read(prompts)
    screen = console()
    streams = len(texts) == 1 and n == 1 and screen.is_terminal and not as_json_object
    outputs: dict[int, RequestOutput] = {}
    interrupted, drafts = False, None
    with Live(quiet) as live:
        llm = open_engine(
            live,
            model=model,
            config=config,
            overrides=overrides,
            compile=compile_ahead,
            truncate=truncate,
        )
        missed = record_steps(llm, record_step)
        transcript = Transcript(screen) if streams else None
        with keeping(out, llm) as keep:
            if transcript is not None:
                warm_up(llm, params, live)
                live.doing("computing")
            requests = Requests(len(texts))
            watched = watching(
                llm,
                requests,
                phase="computing",
                live=live,
                # A line that is renewed between the pieces of a text would tear it.
                renewed=transcript is None,
                metrics=metrics,
            )
            try:
                with watched as watch:
                    try:
                        for output in _run(llm, texts, params, chat, live, transcript):
                            outputs[int(output.request_id)] = output
                            keep(output)
                            requests.done += output.error is None
                            requests.failed += output.error is not None
                            watch.show()
                    finally:
                        drafts = watch.drafts
            except KeyboardInterrupt:
                interrupted = True
    finished = [outputs[number] for number in sorted(outputs)]
    truncated = sum(map(is_truncated, finished))
    if as_json_object:
        results = [as_json(output) for output in finished]
        counts = {"truncated_requests": truncated, "drafts": drafts}
        print(json_text({"results": results, **counts}))
    elif transcript is None:
        _print_all(screen, finished)
    if not as_json_object:
        _print_details(screen, finished, show_ids)
    if truncated:
        print(f"{truncated} of {len(finished)} prompts were truncated to fit.", file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt
    failed: list[DeepInferError] = [o.error for o in finished if o.error is not None]
    unrecorded = missed()
    if unrecorded is not None:
        failed.append(unrecorded)
    for error in failed:
        print(error.as_text(), file=sys.stderr)
    return FAILED if failed else 0


def warm_up(llm: LLM, params: SamplingParams, live: Live) -> None:
    """Compile what one short prompt needs, so that its text does not stop in the middle."""
    live.doing("compiling")
    llm.prepare(sequences=params.n, logprobs=int(params.logprobs or 0))


def _run(
    llm: LLM,
    texts: Sequence[str],
    params: SamplingParams,
    chat: bool,
    live: Live,
    transcript: Transcript | None,
) -> Iterator[RequestOutput]:
    """The requests as they finish."""
    stream: Iterable[RequestOutput]
    if chat:
        stream = llm.stream_chat([[{"role": "user", "content": t}] for t in texts], params)
    else:
        stream = llm.stream(texts, params)
    parts: dict[str, list[RequestOutput]] = {}
    for part in stream:
        of_one = parts.setdefault(part.request_id, [])
        of_one.append(part)
        whole = RequestOutput.join(of_one) if part.finished else None
        if transcript is not None and part.outputs:
            live.clear()
            transcript.show(part.outputs[0])
            if whole is not None:
                transcript.end(whole.outputs[0])
        if whole is not None:
            del parts[part.request_id]
            yield whole


def _read(prompts: Sequence[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise RequestError(
            f"{prompts.count('-')} prompts are '-'.",
            "Each stands for the whole of standard input, which can be read once.",
            "Write '-' once.",
        )
    try:
        return [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    except UnicodeDecodeError as error:
        raise RequestError(
            f"Standard input is no UTF-8 text (byte {error.start}: {error.reason}).",
            "A prompt is text, and no byte of it is replaced.",
            "Send UTF-8.",
        ) from None


def _print_all(screen: Console, outputs: Sequence[RequestOutput]) -> None:
    many = len(outputs) > 1 or any(len(o.outputs) > 1 for o in outputs)
    for output in outputs:
        for sample in output.outputs:
            if many:
                screen.out(f"[{_name(output, sample)}] ", highlight=False, end="")
            transcript = Transcript(screen)
            transcript.show(sample)
            transcript.end(sample)


def _print_details(screen: Console, outputs: Sequence[RequestOutput], show_ids: bool) -> None:
    for output in outputs:
        if show_ids:
            screen.out(f"prompt ids {output.request_id}: {_spaced(output.prompt_token_ids)}")
        for sample in output.outputs:
            name = _name(output, sample)
            if show_ids:
                screen.out(f"output ids {name}: {_spaced(sample.token_ids)}")
            found = sample.logprobs
            if found is None:
                continue
            screen.out(f"log-probs {name}: token id, its log-prob, likeliest ids with theirs")
            rows = zip(sample.token_ids, found.token, found.top_ids, found.top, strict=True)
            for token, own, ids, tops in rows:
                likeliest = (f"{i}:{p:.4f}" for i, p in zip(ids, tops, strict=True))
                screen.out(" ".join([f"  {token} {own:.4f} ", *likeliest]))


def _name(output: RequestOutput, sample: CompletionOutput) -> str:
    return output.request_id if not sample.index else f"{output.request_id}.{sample.index}"


def _spaced(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))
