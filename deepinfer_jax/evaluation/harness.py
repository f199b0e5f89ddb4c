"""The engine as a model of lm-evaluation-harness: importing this registers `deepinfer_jax`."""

# pyright: reportMissingImports=false

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.evaluation import texts
from deepinfer_jax.evaluation.generation import SEED_RULE, cut, parameters, seed_of
from deepinfer_jax.evaluation.lengths import Fitter
from deepinfer_jax.files import replacing
from deepinfer_jax.llm import LLM
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.protocol.batch import request_digest
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text import spellings
from deepinfer_jax.text.chat import render

Tell = Callable[[str, int, int], None]
_log = logging.getLogger(__name__)


@register_model("deepinfer_jax")
class DeepInferLM(TemplateLM):
    """A model of this engine, for `lm_eval.simple_evaluate` or the harness's command."""

    def __init__(
        self,
        model: str | LLM = "nano",
        *,
        seed: int = 0,
        max_gen_toks: int = 256,
        truncate: str | None = None,
        thinking: bool = False,
        digests: str | Path | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        tell: Tell | None = None,
        **engine: Any,
    ):
        """Open a model.

        Args:
            model: as `LLM` takes it, or an open LLM.
            seed: base seed of the run; every generation draws with its own, derived from it.
            max_gen_toks: tokens to generate where a task does not say.
            truncate: `left` drops the first tokens of prompts that are too long, and counts them;
                without it they are errors.
            thinking: in chats, reason before the answer; stop strings hold for the answer alone.
            digests: a file that gets a line of JSON per generation: its seed and its digest.
            batch_size, max_batch_size, device: what the harness's command always passes (1 and
                cuda:0 if nothing is typed). They have no effect, and that is logged: the engine
                fills its steps itself (`max_num_seqs`, `max_num_batched_tokens`), on JAX's device.
            tell: called with (what, done, total) requests.
            engine: everything else goes to `LLM`; `max_length` is its `max_model_len`, and
                `pretrained` its model.

        Raises:
            DeepInferError: whatever cannot be used.
        """
        super().__init__()
        if truncate not in (None, "left"):
            raise ConfigError(
                f"truncate is {truncate!r}.", "Only the left end can be cut.", "Use truncate=left."
            )
        for theirs, ours in (("max_length", "max_model_len"), ("pretrained", "model")):
            if theirs in engine:
                engine[ours] = engine.pop(theirs)
        model = engine.pop("model", model)
        self.llm = LLM(model, **engine) if isinstance(model, str) else _opened(model, engine)
        self.max_length, self.max_gen_toks = self.llm.max_model_len, max_gen_toks
        self.seed, self._thinking, self._tell = int(seed), thinking, tell
        self._fitter = Fitter(self.max_length, self.llm.tokenizer.bos_id, truncate == "left")
        self._digests, self._lines = None if digests is None else Path(digests), list[str]()
        _log.info("deepinfer_jax draws with base seed %d: %s", self.seed, SEED_RULE)
        without = {"batch_size": batch_size, "max_batch_size": max_batch_size, "device": device}
        if given := [f"{k}={v}" for k, v in without.items() if v is not None]:
            _log.info(
                "%s: no effect; the engine fills its steps, on JAX's device", ", ".join(given)
            )

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.llm.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS."""
        return self.llm.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer and how chats are rendered; part of the harness's cache keys."""
        mode = "thinking" if self._thinking else "plain"
        return f"deepinfer_jax-{self.llm.tokenizer.digest[:16]}-v41-{mode}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """A name for what renders chats, which is code and no template."""
        return self.tokenizer_name if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as text, whose special tokens `tok_encode` finds again."""
        rendered = render(
            chat_history,
            thinking=self._thinking,
            continue_final_message=not add_generation_prompt,
        )
        return texts.marked(rendered.pieces)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; BOS is in front, once, unless `add_special_tokens` is False."""
        return texts.encode(self.llm.tokenizer, string, bos=add_special_tokens is not False)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        return {
            "seed": self.seed,
            "seed_rule": SEED_RULE,
            "truncated": self._fitter.count,
            "manifest": self.llm.manifest(),
        }

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],  # type: ignore[override]
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Score (names, context, continuation); an error is raised once the others are done."""
        fitted = self._fitter.fit([(tuple(c), len(t)) for _, c, t in requests])
        pairs = [(c, tuple(t)) for c, (_, _, t) in zip(fitted, requests, strict=True)]
        found: list[tuple[float, bool]] = [(float("nan"), False)] * len(pairs)
        failed = None
        for done, (place, score) in enumerate(self.llm.scores(pairs), 1):
            if score.error is not None:
                failed = failed or score.error
                continue
            found[place] = (score.logprob_sum, score.is_greedy)
            names = requests[place][0]
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, found[place])
            self._told("scoring", done, len(pairs))
        if failed is not None:
            raise failed
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole documents, each token predicted once, with most context."""
        windows, owner = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # the last token of a window is not run
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue every context; an error is raised once the others are done."""
        repeats = list(_repeats(requests))
        params = [
            parameters(
                request.args[1],
                most=self.max_gen_toks,
                seed=seed_of(self.seed, request.task_name, request.doc_id, repeat),
            )
            for request, repeat in zip(requests, repeats, strict=True)
        ]
        prompts = [tuple(self.tok_encode(request.args[0])) for request in requests]
        room = [p.max_tokens for p in params]
        fitted = self._fitter.fit(list(zip(prompts, room, strict=True)))
        asks = [self._ask(*each) for each in zip(requests, fitted, params, strict=True)]
        found, failed = [""] * len(asks), None
        for done, (place, output) in enumerate(self.llm.answer(asks), 1):
            request, chosen = requests[place], params[place]
            if output.error is not None:
                failed = failed or output.error
                continue
            found[place] = self._answer(request, output.outputs[0].text, tuple(chosen.stop))
            self._lines.append(_line(request, repeats[place], output))
            if chosen.temperature == 0:
                self.cache_hook.add_partial("generate_until", request.args, found[place])
            self._told("generating", done, len(asks))
        if self._digests is not None:
            self._digests.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._digests) as temporary:
                temporary.write_text("".join(sorted(self._lines)), encoding="utf-8")
        if failed is not None:
            raise failed
        return found

    def _ask(self, request: Instance, prompt: tuple[int, ...], params: SamplingParams) -> Ask:
        # The reasoning may hold a stop string that is meant for the answer.
        return Ask(
            prompt=prompt, params=replace(params, stop=()) if self._thinks(request) else params
        )

    def _answer(self, request: Instance, text: str, until: tuple[str, ...]) -> str:
        """What counts of a generated text; reasoning that does not end has no answer."""
        if not self._thinks(request):
            return text
        return cut(text.partition(spellings.THINK_END)[2], until)

    def _thinks(self, request: Instance) -> bool:
        return self._thinking and texts.is_chat(request.args[0])

    def _told(self, what: str, done: int, total: int) -> None:
        if self._tell is not None:
            self._tell(what, done, total)


def _opened(model: LLM, engine: Mapping[str, Any]) -> LLM:
    if engine:
        raise ConfigError(
            f"An open model was given {', '.join(engine)}.",
            "They are read while a model is opened.",
            "Give them to LLM, or name the model instead.",
        )
    return model


def _repeats(requests: Sequence[Instance]) -> Iterator[int]:
    """Of each request, how many before it ask for the same document; the harness lists copies."""
    seen: Counter[tuple[Any, Any]] = Counter()
    for request in requests:
        who = (request.task_name, request.doc_id)
        yield seen[who]
        seen[who] += 1


def _line(request: Instance, repeat: int, output: RequestOutput) -> str:
    """A line of the file of digests."""
    content = {
        "task": request.task_name,
        "doc": request.doc_id,
        "repeat": repeat,
        "seq_seed": output.outputs[0].seq_seed,
        "digest": request_digest([output]),
    }
    return json.dumps(content) + "\n"
