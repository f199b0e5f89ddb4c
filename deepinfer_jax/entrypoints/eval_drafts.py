"""`deepinfer eval --suite spec`: drafters judged on the suite's held-out prompts, side by side.

The drafter of the checkpoint is judged in the engine, and folders of training runs by a replay of
greedy decoding on the engine's answers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.entrypoints.engine_options import open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import json_text, write_json
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.evaluation.drafts import Blocks, Judgement, Report, report
from deepinfer_jax.llm import LLM
from deepinfer_jax.sampling.verified import VerifiedBlock
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.skills.evaluation import Entry, prompt_ids
from deepinfer_jax.text.compressed_ids import compressed_token_map

_Answer = tuple[Sequence[int], Sequence[int], int]
"""Prompt and answer, and the longest sequence that both could have become."""
_Replay = Callable[[Sequence[_Answer], str], dict[str, Sequence[Blocks]]]

SHIPPED = "shipped"
"""Name of the checkpoint's own drafter."""
COUNT = 16
"""Prompts per skill when none are asked for."""
_SEQ_SEED = 980406  # and the prompt's number in its skill
_SPLIT_SEED = 0
# A float32 confidence keeps apart logits of up to 16 times the temperature.
_CONFIDENCE_TEMPERATURE = "10"


@dataclass(frozen=True)
class Asked:
    """What is judged, and how.

    Attributes:
        suite: lines of the suite. seed: held-out. count: prompts per skill.
        folders: of training runs by the names that they are shown with.
        temperature: of the engine's answers.
    """

    suite: Sequence[Entry]
    seed: int
    count: int
    folders: Mapping[str, Path]
    temperature: float


def drafter_folders(texts: Sequence[str], temperature: float) -> dict[str, Path]:
    """The folders of `--drafter NAME=FOLDER`, by name.

    Raises ConfigError for another form, a name given twice, a folder that is not there, and a
    temperature at which a replay would not be what an engine does.
    """
    folders: dict[str, Path] = {}
    for text in texts:
        name, given, folder = text.partition("=")
        if not name or not given or name in folders or name == SHIPPED:
            raise ConfigError(
                f"--drafter is {text!r}.",
                f"It is NAME=FOLDER; every name stands once, and {SHIPPED} is the checkpoint's "
                "own drafter.",
                "Write for example --drafter dflash=runs/dflash.",
            )
        folders[name] = Path(folder)
        if not folders[name].is_dir():
            raise ConfigError(
                f"--drafter {name} names {folder}, and there is no such folder.",
                "It is the folder that a drafter's training wrote with --out.",
                "Correct the path.",
            )
    if folders and temperature > 0:
        raise ConfigError(
            f"--drafter was given together with --temperature {temperature:g}.",
            "A folder is judged by a replay of greedy decoding; only the engine draws.",
            "Leave one of the two out.",
        )
    return folders


def judge_drafters(
    asked: Asked,
    *,
    config: str | None,
    overrides: Sequence[str] | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    **engine: Any,
) -> int:
    """Run the suite, show the tables and write the file; returns the exit code.

    Args:
        asked: what is judged.
        config, overrides, engine: as `open_engine` takes them. Without `engine.nextn` the whole
            block is drafted.
        out: gets everything after every skill. as_json: print that instead of tables.
        quiet: no progress.
    """
    settled = settings.load(config, overrides or (), env=environment.read()).engine
    shown: dict[str, Any] | None = None
    interrupted = False
    with Live(quiet) as live:
        # A step that is launched before the one before it is read, or that verifies fewer drafts
        # than there are, would make the drafter look worse than it is.
        llm = open_engine(
            live,
            config=config,
            overrides=overrides,
            nextn=settled.nextn or "auto",
            varlen=False,
            overlap=False,
            confidence_temperature=_CONFIDENCE_TEMPERATURE,
            **engine,
        )
        bench = _bench(llm, asked, live)
        found: dict[str, dict[str, Sequence[Blocks]]] = {name: {} for name in bench.columns}
        try:
            for place, (skill, judged) in enumerate(_skills(bench, asked, live), 1):
                for name, answers in judged.items():
                    found[name][skill] = answers
                shown = _as_json(bench, asked, found, place == len(asked.suite))
                if out is not None:
                    write_json(out, shown)
        except KeyboardInterrupt:
            interrupted = True
    if shown is not None and as_json:
        print(json_text(shown))
    elif shown is not None:
        reports = {name: _report(bench, found[name]) for name in bench.columns}
        _show(reports, bench.places)
    if interrupted:
        raise KeyboardInterrupt
    return 0


@dataclass(frozen=True)
class _Bench:
    """The engine, and what is judged beside its own drafter.

    Attributes:
        llm: the engine. places: drafts of a block.
        trained: what is known of each drafter of a training run.
        replay: (answers, phase) -> the blocks of every answer by each of them.
    """

    llm: LLM
    places: int
    trained: Mapping[str, dict[str, Any]]
    replay: _Replay | None

    @property
    def columns(self) -> list[str]:
        return [SHIPPED] * (self.llm.nextn > 0) + list(self.trained)


def _bench(llm: LLM, asked: Asked, live: Live) -> _Bench:
    if not asked.folders:
        if not llm.nextn:
            raise ConfigError(
                f"There is nothing to judge: the model in {llm.folder} drafts no tokens.",
                "Its checkpoint has no drafter (mtp.* weights), or its Engram tables are off the "
                "device.",
                "Use a checkpoint with a drafter, or add --drafter NAME=FOLDER.",
            )
        return _Bench(llm, llm.nextn, {}, None)
    from deepinfer_jax.training.drafter_evaluate import Answered, Drafter, Target, judge

    block = llm.config.dspark_block_size
    if llm.nextn not in (0, block):
        raise ConfigError(
            f"engine.nextn is {llm.nextn}, and drafters of training runs have blocks of {block}.",
            "Accept lengths of different numbers of drafts say nothing about each other.",
            "Leave engine.nextn out, or leave --drafter out.",
        )
    live.doing("opening the drafters")
    how = {"quantize": llm.assembled.network.arithmetic.quantize_caches}
    drafters = {
        name: Drafter.from_folder(folder, llm.config, **how)
        for name, folder in asked.folders.items()
    }
    token_map = compressed_token_map(llm.tokenizer)
    target = Target.from_folder(llm.folder, llm.config, token_map, **how)

    def replay(answers: Sequence[_Answer], phase: str) -> dict[str, Sequence[Blocks]]:
        given = [Answered(*answer) for answer in answers]

        def tell(done: int, total: int) -> None:
            live.doing(f"{phase} the target's states", f"{done} of {total}", done=done, total=total)

        tell(0, len(given))
        taps = target.taps(given, tell)
        found: dict[str, Sequence[Blocks]] = {}
        for name, drafter in drafters.items():
            live.doing(f"{phase} replaying {name}")
            found[name] = judge(target, drafter, given, taps)
        return found

    trained = {
        name: {"method": drafter.method, "judged_by": "replay", "trained_steps": drafter.step}
        for name, drafter in drafters.items()
    }
    return _Bench(llm, block, trained, replay)


def _skills(
    bench: _Bench, asked: Asked, live: Live
) -> Iterator[tuple[str, dict[str, Sequence[Blocks]]]]:
    """Of each skill in turn, the blocks of every prompt by every drafter."""
    for place, entry in enumerate(asked.suite, 1):
        phase = f"{entry.name}, skill {place} of {len(asked.suite)}:"
        judged: dict[str, Sequence[Blocks]] = {}
        blocks, answers = _answered(bench, entry, asked, phase, live)
        if bench.llm.nextn:
            judged[SHIPPED] = blocks
        if bench.replay is not None:
            judged |= bench.replay(answers, phase)
        yield entry.name, judged


def _answered(
    bench: _Bench, entry: Entry, asked: Asked, phase: str, live: Live
) -> tuple[list[list[VerifiedBlock]], list[_Answer]]:
    """What the engine verified for each prompt, and what it answered."""
    llm = bench.llm
    samples = entry.samples(asked.seed, asked.count)
    prompts = [prompt_ids(sample, llm.tokenizer) for sample in samples]
    blocks: list[list[VerifiedBlock]] = [[] for _ in prompts]

    def tell(done: int, total: int) -> None:
        live.doing(phase, f"{done} of {total} answers", done=done, total=total)

    tell(0, len(prompts))
    params = [
        SamplingParams(
            temperature=asked.temperature, max_tokens=entry.max_tokens, seq_seed=_SEQ_SEED + i
        )
        for i in range(len(prompts))
    ]
    llm.watch_drafts(lambda prompt, _, block: blocks[prompt].append(block))
    try:
        outputs = llm.generate(None, params, prompts, tell)
    finally:
        llm.watch_drafts(None)
    answers: list[_Answer] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is not None:
            raise output.error
        limit = min(len(prompt) + entry.max_tokens, llm.max_model_len)
        answers.append((prompt, output.outputs[0].token_ids, limit))
    return blocks, answers


def _report(bench: _Bench, skills: Mapping[str, Sequence[Blocks]]) -> Report:
    return report(skills, bench.places, _SPLIT_SEED)


def _as_json(
    bench: _Bench,
    asked: Asked,
    found: Mapping[str, Mapping[str, Sequence[Blocks]]],
    finished: bool,
) -> dict[str, Any]:
    drafters = []
    for name in bench.columns:
        made = _report(bench, found[name])
        about = bench.trained.get(name, {"judged_by": "engine"})
        rows = [_row(line) for line in made.judgements]
        drafters.append({"name": name, **about, "temperatures": made.temperatures, "rows": rows})
    return {
        "suite": "spec",
        "seed": asked.seed,
        "n": asked.count,
        "temperature": asked.temperature,
        "places": bench.places,
        "finished": finished,
        "drafters": drafters,
        "manifest": bench.llm.manifest(),
    }


def _row(line: Judgement) -> dict[str, Any]:
    numbers = line.statistics
    return {
        "skill": line.skill,
        "n": numbers.prompts,
        "steps": numbers.steps,
        "drafts": numbers.drafts,
        "accept_length": numbers.length,
        "acceptance": numbers.acceptance,
        "ece": numbers.calibration_error,
        "auroc": numbers.ranking_area,
        "judged_half": {"ece": line.before, "ece_scaled": line.after},
    }


def _show(reports: Mapping[str, Report], places: int) -> None:
    lengths = Table(box=None, padding=(0, 2, 0, 0))
    lengths.add_column("accept length", no_wrap=True)
    for name in ("n", *reports):
        lengths.add_column(name, justify="right", no_wrap=True)
    for lines in zip(*(made.judgements for made in reports.values()), strict=True):
        numbers = [line.statistics for line in lines]
        shown = [_text(number.length, 2) for number in numbers]
        lengths.add_row(lines[0].skill, str(numbers[0].prompts), *shown)
    whole = Table(box=None, padding=(0, 2, 0, 0))
    whole.add_column("all skills", no_wrap=True)
    for name in ("steps", *map(str, range(1, places + 1)), "ECE", "scaled", "AUROC"):
        whole.add_column(name, justify="right", no_wrap=True)
    for name, made in reports.items():
        line = made.judgements[-1]
        numbers = line.statistics
        whole.add_row(
            name,
            str(numbers.steps),
            *(_text(rate, 3) for rate in numbers.acceptance),
            _text(line.before, 4),
            _text(line.after, 4),
            _text(numbers.ranking_area, 3),
        )
    console = Console(highlight=False, markup=False)
    console.print(lengths)
    console.print()
    console.print(whole)


def _text(number: float, digits: int) -> str:
    return "-" if math.isnan(number) else f"{number:.{digits}f}"
