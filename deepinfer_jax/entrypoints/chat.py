"""`deepinfer chat`: a conversation, typed on a terminal or given as messages."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.answers import Transcript, keeping
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import (
    Compile,
    Effort,
    Model,
    SeqSeed,
    Thinking,
    TopK,
    TopP,
    effort_level,
    open_engine,
)
from deepinfer_jax.entrypoints.generate import warm_up
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import completion_json, console, json_text
from deepinfer_jax.errors import ConfigError, DeepInferError, RequestError
from deepinfer_jax.llm import LLM
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.options import ChatOptions

_QUIT = "/quit"


def command(
    message: Annotated[
        list[str] | None,
        typer.Option(
            "--message",
            metavar="TEXT",
            help="A turn; repeatable. After a tool call it is the call's result.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message.")
    ] = None,
    thinking: Thinking = None,
    effort: Effort = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE.json", help="A list of function declarations."),
    ] = None,
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Most tokens of one answer.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0, the default, takes the likeliest token.")
    ] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    seq_seed: SeqSeed = None,
    compile_ahead: Compile = None,
    out: options.Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Talk with the model; /quit or end of input leaves. Exits with 1 if an answer failed."""
    if not message and (as_json or not sys.stdin.isatty()):
        raise ConfigError(
            "chat has no --message" + (" under --json." if as_json else " and no terminal."),
            "Without messages it reads what is typed on a terminal and prints text.",
            "Add --message TEXT, once for every turn.",
        )
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seq_seed=seq_seed,
    )
    asked = ChatOptions(
        thinking=thinking,
        effort=effort_level(effort),
        tools=() if tools is None else _declarations(tools),
    )
    screen = console()
    with Live(quiet) as live:
        llm = open_engine(
            live, model=model, config=config, overrides=overrides, compile=compile_ahead
        )
        with keeping(out, llm) as keep:
            if screen.is_terminal and not as_json:
                warm_up(llm, params, live)
            talk = Conversation(llm, params, asked, system, keep)
            if not message:
                return _typed(talk, screen, live)
            return _given(talk, message, None if as_json else screen, live)


class Conversation:
    """The history of a conversation, and the engine that continues it.

    Attributes:
        messages: as the chat completions protocol has them.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        asked: ChatOptions,
        system: str | None = None,
        keep: Callable[[RequestOutput], None] = lambda output: None,
    ):
        """Begin one.

        Args:
            llm: the engine.
            params: how to draw.
            asked: keywords of `LLM.stream_chat`.
            system: the system message.
            keep: called with every turn of the model; its request id is the turn's number.
        """
        self._llm, self._params, self._asked = llm, params, asked
        self._keep, self._turns = keep, 0
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._unanswered: list[str] = []
        self._calls = 0

    def add(self, text: str) -> bool:
        """Take one turn: a call's result while one is awaited, else a user's message.

        Returns whether it is the model's turn, which it is not while results are still awaited.
        """
        if self._unanswered:
            call = self._unanswered.pop(0)
            self.messages.append({"role": "tool", "tool_call_id": call, "content": text})
            return not self._unanswered
        self.messages.append({"role": "user", "content": text})
        return True

    @property
    def awaited(self) -> tuple[str, ...]:
        """Ids of the tool calls whose results are still to come."""
        return tuple(self._unanswered)

    def take_back(self) -> None:
        """Forget the last turn that was added, as if it had not been."""
        last = self.messages.pop()
        if last["role"] == "tool":
            self._unanswered.insert(0, last["tool_call_id"])

    def answer(self, show: Callable[[CompletionOutput], None] = lambda part: None) -> RequestOutput:
        """The model's turn, which is added to the history; `show` gets each part as it comes."""
        parts = []
        for part in self._llm.stream_chat(self.messages, self._params, **self._asked):
            parts.append(part)
            for new in part.outputs:
                show(new)
        whole = dataclasses.replace(RequestOutput.join(parts), request_id=f"{self._turns}")
        self._turns += 1
        self._keep(whole)
        if whole.error is None:
            self._remember(whole.outputs[0])
        return whole

    def _remember(self, sample: CompletionOutput) -> None:
        kept: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if sample.reasoning:
            kept["reasoning_content"] = sample.reasoning
        if sample.tool_calls:
            names = [f"call_{self._calls + i}" for i in range(len(sample.tool_calls))]
            self._calls += len(names)
            self._unanswered = list(names)
            kept["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for name, call in zip(names, sample.tool_calls, strict=True)
            ]
        self.messages.append(kept)


def _given(talk: Conversation, turns: Sequence[str], screen: Console | None, live: Live) -> int:
    """Answer every turn in sequence; the first that fails ends the conversation."""
    answers: list[dict[str, Any]] = []
    error: DeepInferError | None = None
    for place, text in enumerate(turns, 1):
        if not talk.add(text):
            if place == len(turns):
                error = _awaiting(talk.awaited)
            continue
        last = _answer(talk, screen, live)
        answers += [completion_json(sample) for sample in last.outputs]
        error = last.error
        if error is not None:
            break
    if error is not None:
        print(error.as_text(), file=sys.stderr)
    if screen is None:
        failure = None if error is None else error.as_json()
        print(json_text({"answers": answers, "messages": talk.messages, "error": failure}))
    return 0 if error is None else FAILED


def _typed(talk: Conversation, screen: Console, live: Live) -> int:
    """Read turns until /quit or end of input; a turn that fails is taken back."""
    live.clear()
    code = 0
    while True:
        try:
            text = input(f"result of {talk.awaited[0]}> " if talk.awaited else "> ")
        except EOFError:
            screen.out("")
            return code
        if text.strip() == _QUIT:
            return code
        if not text.strip() or not talk.add(text):
            continue
        output = _answer(talk, screen, live)
        if output.error is not None:
            print(output.error.as_text(), file=sys.stderr)
            talk.take_back()
            code = FAILED


def _answer(talk: Conversation, screen: Console | None, live: Live) -> RequestOutput:
    """The finished turn, printed as it grows when there is a screen."""
    live.doing("computing")
    transcript = None if screen is None else Transcript(screen)

    def show(part: CompletionOutput) -> None:
        if transcript is not None:
            live.clear()
            transcript.show(part)

    output = talk.answer(show)
    live.clear()
    if transcript is not None and output.outputs:
        transcript.end(output.outputs[0])
    if output.outputs and output.outputs[0].finish_reason == "length":
        live.note(f"cut off after {len(output.outputs[0].token_ids)} tokens (--max-tokens)")
    return output


def _awaiting(calls: Sequence[str]) -> RequestError:
    return RequestError(
        f"The messages end while {len(calls)} tool calls have no result: {', '.join(calls)}.",
        "The model goes on when each of its calls has one.",
        "Add a --message for each.",
    )


def _declarations(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as JSON ({type(error).__name__}: {error}).",
            "--tools takes the function declarations of the chat completions protocol.",
            "Correct the path or the file.",
        ) from None
    if not isinstance(found, list):
        raise RequestError(
            f"{path} holds {type(found).__name__}, not a list.",
            "--tools takes a list of function declarations.",
            "Put the declarations between [ and ].",
        )
    return found
