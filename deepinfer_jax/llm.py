"""`LLM`: prompts in, one `RequestOutput` per prompt out, in order, whatever fails."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import jax
import numpy as np

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.assembly import assemble
from deepinfer_jax.drafting import drafting_of
from deepinfer_jax.engine.admission import Admission, Request
from deepinfer_jax.engine.meter import Meter, Snapshot
from deepinfer_jax.engine.notices import Notices, Reporter
from deepinfer_jax.engine.pairs import admit_pairs
from deepinfer_jax.engine.sequence import Sequence as Sample
from deepinfer_jax.engine.tokens import DraftWatch
from deepinfer_jax.engine_settings import check_replay, make_engine
from deepinfer_jax.errors import RequestError
from deepinfer_jax.model_source import located, open_tokenizer
from deepinfer_jax.ops.device import devices, free_bytes
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.report.manifest import manifest
from deepinfer_jax.report.plan import MemoryPlan, out_of_memory
from deepinfer_jax.request import RequestOutput, Score
from deepinfer_jax.runner.compile import keep_compiled, source_digest
from deepinfer_jax.runner.record import Recorder, StepRecord
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.options import ChatOptions, check_options

Prompt = str | Sequence[int] | np.ndarray


class _Default(str):
    """A default that can be told from the same text passed by the caller."""


_NANO = _Default("nano")


class LLM:
    """A network with its tokenizer, ready to answer."""

    def __init__(
        self,
        model: str | Path = _NANO,
        *,
        tokenizer: str | Path | None = None,
        config: str | Path | None = None,
        overrides: Sequence[str] = (),
        progress: Reporter | None = None,
        **engine: Any,
    ):
        """Load a model and place it on the device.

        Args:
            model: a packaged model's name, a model folder, or a Hugging Face repository
                (`owner/name`, or `owner/name@revision`). Left out, it gives way to a config and
                to DEEPINFER_HF_MODEL_DIR; passed, it wins over both, and only for a repository
                that folder stands in for the download.
            tokenizer: a tokenizer.json or its folder; the model's own when left out.
            config: name or file of an engine config.
            overrides: texts `a.b=c`, as `--set` takes them.
            progress: called with (what, done, total) while loading and after each compilation, and
                with an "alarm: ..." once if the drafter's later places go wrong. Without it, that
                and a program that is compiled after warm-up are RuntimeWarnings.
            engine: fields of `EngineConfig`, such as `max_num_seqs`, or the original engine's
                names for them.

        Raises:
            DeepInferError: whatever cannot be used, before anything is computed.
        """
        explicit = settings.engine_fields(engine)
        if not isinstance(model, _Default):
            explicit["model"] = str(model)
        self._env = environment.read()
        asked = settings.load(config, overrides, env=self._env, explicit=explicit)
        asked, self.folder, self._revision = located(asked, self._env)
        self._settings, notices = asked, Notices(progress)
        self.config = asked.model_config()
        self.tokenizer = open_tokenizer(tokenizer, self.folder, self.config)
        token_map = compressed_token_map(self.tokenizer)
        check_compressed_map(token_map, self.config)
        place = asked.engine.compile_cache_dir
        kept = None if place is None else keep_compiled(Path(place))
        drafting = drafting_of(asked.engine, self.config, self.folder)
        self.assembled = assemble(
            self.folder,
            self.config,
            asked.engine,
            token_map,
            drafter=drafting.count > 0,
            drafts=drafting.count,
            tokenizer_sha256=self.tokenizer.digest,
            progress=progress,
            available_bytes=free_bytes(devices()[0]),
        )
        check_replay(asked.engine, self.config, drafting.count)
        self._engine = make_engine(
            asked.engine, self.assembled, token_map, drafting, kept, notices.compiled
        )
        self._engine.acceptance.on_alarm = notices.alarm
        self._admission = Admission(
            self.tokenizer, self.config, self.max_model_len, cast(Any, asked.engine.truncate)
        )

    @property
    def meter(self) -> Meter:
        """Counts and seconds since the model was loaded."""
        return self._engine.meter

    @property
    def nextn(self) -> int:
        """Tokens that are drafted for each sequence in a step; 0 for none."""
        return self._engine.drafts

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.assembled.positions

    def prepare(
        self,
        prompt_tokens: Iterable[int] = (1,),
        sequences: int = 1,
        logprobs: int = 0,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Compile ahead, side by side, what the first answers will need.

        With `varlen` and drafts, what steps of each size take is measured first. With
        `compile="all"` that is every program without top log-probs and with so many; with
        `compile="none"` nothing.

        Args:
            prompt_tokens: lengths of the prompts, in tokens.
            sequences: how many run at the same time.
            logprobs: top log-probs that will be asked for.
            prompt_logprobs: top log-probs of prompts that will be asked for; None for none. `score`
                asks for 0.
        """
        how = self._settings.engine.compile
        self._measure()
        if how == "all":
            self._engine.prepare_all((logprobs,), prompt_logprobs)
        elif how == "lazy":
            self._engine.prepare(tuple(prompt_tokens), sequences, logprobs, prompt_logprobs)

    def _measure(self) -> None:
        """Measure what steps take, once, where the lengths of verification follow it."""
        asked, engine = self._settings.engine, self._engine
        if not asked.varlen or not engine.drafts or engine.measured:
            return
        device, folder = devices()[0], asked.cost_cache_dir
        identity = {
            "weights": self.assembled.digest,
            "source": source_digest(),
            "device": f"{device.platform} {device.device_kind}",
            "options": repr(engine.programs.options),
            "drafts": engine.drafts,
        }
        place = None if folder is None else Path(folder).expanduser()
        engine.measure(place, identity, asked.cost_cache_ttl)

    @property
    def snapshot(self) -> Snapshot:
        """What runs, waits and is held now, with the counts so far."""
        return self._engine.snapshot

    def watch(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` after every step from now on; None ends it."""
        self._engine.watch = callback

    def watch_drafts(self, callback: DraftWatch | None) -> None:
        """Call `callback` with every block of drafts verified from now on; None ends it."""
        self._engine.watch_drafts = callback

    def record_steps(self, steps: Iterable[int], folder: Path) -> Recorder:
        """Write steps into files that `deepinfer replay` runs again; the next step is step 1.

        Raises ConfigError as `Recorder` does.
        """
        self._engine.recorder = Recorder(folder, steps, self.about_steps())
        return self._engine.recorder

    def about_steps(self) -> dict[str, Any]:
        """What the bits of a step depend on besides its inputs, as plain JSON values."""
        options = dataclasses.asdict(self._engine.programs.options)
        temperature = options["confidence_temperature"]  # a list in JSON
        return {
            "manifest": self.manifest(),
            "engine": json.loads(self._settings.canonical_json())["engine"],
            "options": options | {"confidence_temperature": list(temperature)},
            "source": source_digest(),
        }

    def replay(self, recorded: StepRecord) -> StepRecord:
        """Run a recorded step again. Raises RequestError when it does not fit this engine."""
        return self._engine.replay(recorded)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[[int, int], None] = True,
        multi_modal_data: Any = None,
    ) -> list[RequestOutput]:
        """Answer all prompts.

        Args:
            prompts: texts (BOS is put before them) or lists of token ids.
            sampling_params: one for all, or one per prompt; the default draws 16 tokens.
            prompt_token_ids: ids instead of, or for, `prompts`; they win.
            use_tqdm: a function called with (finished, all) prompts, for a progress bar; True and
                False are accepted and show nothing, since only commands print.
            multi_modal_data: refused; images are not supported yet.

        Returns:
            One output per prompt, in order. A prompt that cannot run has `.error` and no outputs.
        """
        requests = self._admission.prompts(
            prompts, sampling_params, prompt_token_ids, multi_modal_data
        )
        for _ in self._run(requests, use_tqdm if callable(use_tqdm) else None):
            pass
        return [self._shown(request) for request in requests]

    def answer(self, asks: Iterable[Ask]) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (place among the asks, finished output) as they finish, each place once.

        For protocols: an ask is a prompt or a conversation with its own parameters. One that
        cannot run has `.error` and does not stop the others.
        """
        requests = self._admission.asks(asks)
        for place, request in enumerate(requests):
            if request.error is not None:
                yield place, self._shown(request)
        for stepped in self._run(requests, None):
            for request, _ in stepped:
                if all(s.finished for s in request.samples):
                    yield int(request.request_id), self._shown(request)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        multi_modal_data: Any = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields after every step what it has added to each prompt.

        An output holds what is new since the prompt's previous one, and only the samples that
        have something new; the last of a prompt has `finished` set. `RequestOutput.join` makes
        what `generate` returns of all outputs of a prompt.
        """
        requests = self._admission.prompts(
            prompts, sampling_params, prompt_token_ids, multi_modal_data
        )
        return self._stream(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool | None = True,
        effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = None,
        response_format: Any = None,
        task: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; messages as in the chat completions protocol.

        `.outputs[i].text` is the answer, `.reasoning` and `.tool_calls` stand beside it.

        Args:
            messages: one conversation or a list of them, rendered by `text.chat.render`, as are
                all arguments but the next.
            sampling_params: one for all, or one per conversation.
            thinking: whether the model reasons before it answers; None leaves it to `effort`.
            effort: none, minimal, low, medium, high, xhigh, max, ultra, or 1..100.
            tools: function declarations.
            tool_choice: auto, none, required, or a named function.
            response_format: text, json_object or json_schema. The JSON formats are written into
                the prompt and not enforced: the answer may still be something else.
            task: quick-instruction task of the last user message.

        Returns:
            One output per conversation, in order. One that cannot run has `.error`.
        """
        options = ChatOptions(
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            task=task,
        )
        requests = self._admission.chats(messages, sampling_params, options)
        for _ in self._run(requests, None):
            pass
        return [self._shown(request) for request in requests]

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """As `chat`, step by step as `stream`; `options` are those of `chat`.

        A call streams in parts: the first has its name, all have pieces of its arguments.
        """
        check_options(options)
        return self._stream(self._admission.chats(messages, sampling_params, options))

    def score(
        self,
        pairs: Iterable[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        use_tqdm: bool | Callable[[int, int], None] = True,
    ) -> list[Score]:
        """How likely each continuation is after its context.

        Args:
            pairs: (context, continuation), both as texts or both as token ids. Two texts are
                encoded together, behind one BOS; ids are taken as they are. An empty context is
                BOS alone, and an empty continuation has the log-prob 0.
            use_tqdm: as in `generate`.

        Returns:
            One score per pair, in order, of raw log-probs. A pair that cannot be scored, such as
            one longer than `max_model_len`, has `.error`; nothing is truncated.

        Raises:
            RequestError: the engine reports processed log-probs.
        """
        found = dict(self.scores(pairs, use_tqdm))
        return [found[place] for place in range(len(found))]

    def scores(
        self, pairs: Iterable[Any], use_tqdm: bool | Callable[[int, int], None] = True
    ) -> Iterator[tuple[int, Score]]:
        """As `score`, but yields (place among the pairs, score) as they finish, each place once."""
        self._check_raw()
        admitted = admit_pairs(list(pairs), self._admission)
        owner = {}
        for place, pair in enumerate(admitted):
            if pair.request is None or pair.request.error is not None:
                yield place, pair.score()
            else:
                owner[id(pair.request)] = place
        requests = [pair.request for pair in admitted if pair.request is not None]
        for stepped in self._run(requests, use_tqdm if callable(use_tqdm) else None):
            for request, _ in stepped:
                if all(s.finished for s in request.samples):
                    place = owner[id(request)]
                    yield place, admitted[place].score()

    def _check_raw(self) -> None:
        if self._settings.engine.logprobs_mode != "raw":
            raise RequestError(
                "score was called with engine.logprobs_mode=processed.",
                "A score is a sum of raw log-probs: of no temperature and no filter.",
                "Open the model with logprobs_mode=raw, which is the default.",
            )

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        mode = self._settings.engine.logprobs_mode
        for request in requests:
            if request.error is not None:
                yield request.output(mode)
        for stepped in self._run(requests, None):
            for request, samples in stepped:
                yield request.news(samples, mode)

    def _run(
        self, requests: list[Request], tell: Callable[[int, int], None] | None
    ) -> Iterator[list[tuple[Request, list[Sample]]]]:
        """Run to the end; after each step yields the requests it moved, with their samples."""
        owner = {id(s): r for r in requests for s in r.samples}
        self._measure()
        if self._settings.engine.compile == "all" and not self._engine.programs.sealed:
            asked = [s.params for r in requests for s in r.samples]
            scored = [p.prompt_logprobs for p in asked if p.prompt_logprobs is not None]
            tops = {p.logprobs or 0 for p in asked}
            self._engine.prepare_all(tops, max(scored) if scored else None)
        now = time.perf_counter()
        for request in requests:
            request.started = now
        running = [s for r in requests for s in r.samples]
        done = sum(not r.samples for r in requests)
        for stepped in self._steps(running):
            moved: dict[str, tuple[Request, list[Sample]]] = {}
            for sample in stepped:
                request = owner[id(sample)]
                moved.setdefault(request.request_id, (request, []))[1].append(sample)
                if request.first_token is None:
                    request.first_token = time.perf_counter()
            done += sum(all(s.finished for s in r.samples) for r, _ in moved.values())
            if tell is not None:
                tell(done, len(requests))
            yield list(moved.values())

    def _steps(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        try:
            yield from self._engine.run(samples)
        except jax.errors.JaxRuntimeError as error:
            refusal = out_of_memory(error, self.plan())
            if refusal is None:
                raise
            raise refusal from error

    def _shown(self, request: Request) -> RequestOutput:
        return request.output(self._settings.engine.logprobs_mode)

    def plan(self) -> MemoryPlan:
        """What this engine holds in memory, by part."""
        return self.assembled.plan

    def manifest(self) -> dict[str, Any]:
        """What decides this engine's results, as plain JSON values."""
        net = self.assembled
        return manifest(
            self._settings,
            self._env,
            net.network.ops,
            arithmetic=net.network.arithmetic.name,
            cache_format=net.network.arithmetic.caches.name,
            max_model_len=net.positions,
            devices=net.mesh.size,
            checkpoint=net.digest,
            revision=self._revision,
            tokenizer=self.tokenizer.digest,
        )
