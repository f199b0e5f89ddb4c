"""The DEEPINFER_* variables: names, types, legal values, and what each does here; read once.

The original engine's names are all known. One whose feature does not exist here may still be set
to the value that describes what happens anyway; every other value is refused, never ignored.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

from deepinfer_jax.errors import EnvError

PREFIX = "DEEPINFER_"
KERNEL_PREFIX = "DEEPINFER_KERNEL_"
Kind = Literal["bool", "int", "float", "text"]


class Variable(NamedTuple):
    """One known variable.

    Attributes:
        name: the full name.
        kind: how its text is read; a bool is 0 or 1 and nothing else.
        effect: what it does here; for one that is not honoured, why it cannot be.
        default: the text that stands for an unset variable; empty when there is none.
        only: whether `default` is the one value that can be honoured.
        refused: whether no value can be honoured.
        choices: the legal texts; empty for any of the kind.
    """

    name: str
    kind: Kind
    effect: str
    default: str = ""
    only: bool = False
    refused: bool = False
    choices: tuple[str, ...] = ()


_HONOURED = (
    Variable("HF_MODEL_DIR", "text", "the model folder, instead of the packaged one"),
    Variable("BATCH_INVARIANT", "bool", "1: a row's bits never depend on its batch", "0"),
    Variable("JIT_CACHE_DIR", "text", "folder that keeps compiled programs"),
    Variable("ENGRAM_FORCE_GPU_STORAGE", "bool", "1: Engram tables in device memory, 0: in host"),
    Variable(
        "YOCO_PREFILL_TRUNCATION_MODE",
        "text",
        "off, or bounded replay: mask, compact (the decoder's layers run a prompt's end only)",
        "off",
        choices=("off", "mask", "compact"),
    ),
    Variable("YOCO_PREFILL_KEEP_TOKENS", "int", "prompt tokens that bounded replay keeps", "0"),
    Variable("USE_NEXTN_DECODE", "int", "tokens drafted for a sequence in a step", "0"),
    Variable(
        "MAX_BACKTRACKING_TOKENS",
        "int",
        "positions that rings keep beyond their window, at least one more than is drafted",
        "6",
    ),
    Variable(
        "ENABLE_MTP_VARLEN", "bool", "1: how many drafts are verified follows confidence", "0"
    ),
    Variable(
        "DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        "text",
        "what the confidence of each draft is divided by; one number, or one a draft",
        "1.0",
    ),
    Variable("DECODE_PERF_CACHE_DIR", "text", "folder that keeps measured times of steps"),
    Variable("DECODE_PERF_CACHE_TTL_SEC", "int", "seconds for which they are used", "3600"),
)
# Why a feature is missing, then its variables: name, kind and, where one value describes what
# happens anyway, that value.
_MISSING = (
    (
        "falling back to another kernel would change results without a trace",
        "KERNEL_POLICY text strict",
    ),
    (
        "expert load balancing is not built yet",
        "OVERRIDE_NUM_EXTRA_EXPERTS int 0",
        "EXPERT_COUNT_WINDOW_SIZE int",
        "EXPERT_REARRANGEMENT_STEP_INTERVAL int 0",
        "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE bool 0",
        "REARRANGE_P2P_GROUPS int",
        "MOE_LB_STAT_INTERVAL int",
        "SHOW_EPLB_DETAIL bool 0",
    ),
    (
        "routing is never replaced by random numbers, whose results would mean nothing",
        "FORCE_IMBALANCE_RATIO float 0",
        "FORCE_LOAD_BALANCE bool 0",
    ),
    (
        "structured output is not built yet",
        "XGRAMMAR_TIMEOUT int",
        "XGRAMMAR_DEBUG bool 0",
        "XGRAMMAR_DISABLE_CACHE bool",
        "XGRAMMAR_CACHE_LIMIT_BYTES int",
        "SO_BUILDER_CPUS int",
    ),
    (
        "image input is not built yet",
        "USE_MULTIMODAL_POOL bool 0",
        "MULTIMODAL_POOL_SIZE_GB int",
        "MULTI_MODAL_BUFFER_SIZE int",
        "MULTI_MODAL_WORKER_TIMEOUT int",
    ),
    (
        "a KV store is not built yet",
        "PREFILL_STORE_EXTRA_STATE bool 0",
        "PREFILL_STORE_EXTRA_SIZE int",
    ),
    (
        "a request's own sampling parameters are never overridden from outside",
        "SAMPLER_FORCE_TOPK int 0",
        "DECODE_TOKEN_BLACKLIST text",
    ),
    ("this statistic is not built yet", "COMPUTE_SUM_SMALLER_PROBS bool 0"),
    (
        "the order of launches is the engine's own and cannot change a result",
        "ZERO_OVERHEAD_SCHEDULING bool",
        "PREFILL_ATTEMPT_INTERVAL int",
        "PREFILL_ANY_ATTEMPT_INTERVAL int",
    ),
    (
        "the rows of a step, and with them its memory, are set by engine.max_num_batched_tokens",
        "PREFILL_MAX_SUM_SEQLEN_K int",
        "INDEX_ATTN_MEMORY_LIMIT int",
    ),
    (
        "there is one state slot per running sequence, set by engine.max_num_seqs",
        "NUM_STATE_SLOTS_RATIO float",
    ),
    ("the model config's engram_pad_token_id decides it", "ENGRAM_PAD_TOKEN int"),
    (
        "XLA compiles every step, so there are no CUDA graphs to turn off or to size",
        "ENFORCE_EAGER bool",
        "DFLASH_ENFORCE_EAGER bool",
        "CUDAGRAPH_BATCH_SIZE_INTERVAL int",
        "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL int",
    ),
    (
        "transfers between devices and their memory belong to XLA",
        "NCCL_NUM_SMS int",
        "USERBUFFER_COMM_SMS int",
        "GLOO_TIMEOUT int",
        "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS int",
    ),
    (
        "the hardware is read from the devices JAX reports, and JAX_PLATFORMS chooses among them",
        "ACCELERATOR text",
    ),
    (
        "there is no periodic log line that it could change",
        "LOGGING_INTERVAL_STEP int",
        "RINGBUFFER_WARNING_INTERVAL int",
        "CPP_LOG_LEVEL int",
    ),
    ("Python's garbage collector is left as it is", "GC_INTERVAL_STEP int"),
    (
        "profiles and memory traces come from jax.profiler",
        "PROFILE_HTTP_ENABLE bool 0",
        "PROFILE_HTTP_PORT_BASE int",
        "TORCH_PROFILER_DIR text",
        "PROFILE_TORCH_CUDA_MEMORY bool",
        "ENABLE_MEMORY_TRACING bool 0",
    ),
    (
        "there is no guard against device synchronisation that could be turned off",
        "DISABLE_SYNC_GUARD bool",
    ),
)


def _missing() -> Iterator[Variable]:
    for reason, *lines in _MISSING:
        for line in lines:
            name, kind, *default = line.split()
            text = default[0] if default else ""
            yield Variable(name, cast(Kind, kind), reason, text, bool(default), not default)


VARIABLES: Mapping[str, Variable] = {
    PREFIX + v.name: v._replace(name=PREFIX + v.name) for v in (*_HONOURED, *_missing())
}


@dataclass(frozen=True)
class Env:
    """What the environment asked for, parsed and checked.

    Attributes:
        hf_model_dir: a model folder, or None.
        batch_invariant: None when not set, so that a config file can decide.
        compile_cache_dir: folder of compiled programs, or None.
        engram: where the Engram tables lie ("device" or "host"), or None when not set.
        prefill_truncation: "off", "mask" or "compact", or None when not set.
        prefill_keep_tokens: or None when not set.
        nextn: draft tokens per step, or None when not set.
        max_backtracking_tokens: or None when not set.
        varlen: verify by confidence, or None when not set.
        confidence_temperature: as given, or None when not set.
        cost_cache_dir: folder of measured times, or None when not set. cost_cache_ttl: seconds.
        kernel_policy: how a kernel that cannot serve is treated.
        kernels: (op, kernel name) pairs of DEEPINFER_KERNEL_<OP>, sorted by op.
        given: (name, text) of every DEEPINFER_* variable that was set, sorted, for the record.
        xla_flags: the text of XLA_FLAGS, which can change results and so belongs to the record.
    """

    hf_model_dir: str | None = None
    batch_invariant: bool | None = None
    compile_cache_dir: str | None = None
    engram: str | None = None
    prefill_truncation: str | None = None
    prefill_keep_tokens: int | None = None
    nextn: int | None = None
    max_backtracking_tokens: int | None = None
    varlen: bool | None = None
    confidence_temperature: str | None = None
    cost_cache_dir: str | None = None
    cost_cache_ttl: int | None = None
    kernel_policy: str = "strict"
    kernels: tuple[tuple[str, str], ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    xla_flags: str = ""

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(name, text, source) for reports: each variable that is set, then each with a default."""
        given = dict(self.given)
        unset = [n for n, v in VARIABLES.items() if v.default and n not in given]
        return (
            *((n, text, "environment") for n, text in self.given),
            *((n, VARIABLES[n].default, "default") for n in unset),
        )


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Parse the DEEPINFER_* variables of `environ` (default: of this process).

    Raises:
        EnvError: an unknown name, text of the wrong type, or a value whose feature is missing.
    """
    environ = os.environ if environ is None else environ
    given = {k: environ[k] for k in sorted(environ) if k.startswith(PREFIX)}
    values: dict[str, str] = {}
    kernels = []
    for name, text in given.items():
        if name in VARIABLES:
            _check(VARIABLES[name], text)
            values[name.removeprefix(PREFIX)] = text
        elif name.startswith(KERNEL_PREFIX):
            kernels.append((_op_of(name, text), text))
        else:
            raise _unknown(name)
    engram = values.get("ENGRAM_FORCE_GPU_STORAGE")
    invariant = values.get("BATCH_INVARIANT")
    varlen = values.get("ENABLE_MTP_VARLEN")
    return Env(
        hf_model_dir=values.get("HF_MODEL_DIR"),
        batch_invariant=None if invariant is None else invariant == "1",
        compile_cache_dir=values.get("JIT_CACHE_DIR"),
        engram=None if engram is None else ("device" if engram == "1" else "host"),
        prefill_truncation=values.get("YOCO_PREFILL_TRUNCATION_MODE"),
        prefill_keep_tokens=_number(values, "YOCO_PREFILL_KEEP_TOKENS"),
        nextn=_number(values, "USE_NEXTN_DECODE"),
        max_backtracking_tokens=_number(values, "MAX_BACKTRACKING_TOKENS"),
        varlen=None if varlen is None else varlen == "1",
        confidence_temperature=values.get("DFLASH_CONFIDENCE_HEAD_TEMPERATURE"),
        cost_cache_dir=values.get("DECODE_PERF_CACHE_DIR"),
        cost_cache_ttl=_number(values, "DECODE_PERF_CACHE_TTL_SEC"),
        kernel_policy=values.get("KERNEL_POLICY", "strict"),
        kernels=tuple(kernels),
        given=tuple(given.items()),
        xla_flags=environ.get("XLA_FLAGS", ""),
    )


def _number(values: Mapping[str, str], name: str) -> int | None:
    return int(values[name]) if name in values else None


def user_cache(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for files that can be made again: XDG_CACHE_HOME, else ~/.cache.

    As the XDG base directory specification says, a relative XDG_CACHE_HOME does not count.
    """
    environ = os.environ if environ is None else environ
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    return Path(environ.get("HOME") or os.path.expanduser("~")) / ".cache"


def _check(variable: Variable, text: str) -> None:
    name, kind = variable.name, variable.kind
    wanted = {
        "bool": "0 or 1",
        "int": "an integer",
        "float": "a number",
        "text": "a text that is not empty",
    }[kind]
    if variable.choices:
        wanted = f"one of {', '.join(variable.choices)}"
    if not _parses(kind, text) or (variable.choices and text not in variable.choices):
        raise EnvError(
            f"{name} is {text!r}, which is not {wanted}.",
            "A value that is guessed at could turn a switch the wrong way.",
            f"Set it to {wanted}, or unset it.",
        )
    if not variable.refused and (not variable.only or text == variable.default):
        return
    raise EnvError(
        f"{name}={text} cannot be honoured.",
        f"{variable.effect[0].upper()}{variable.effect[1:]}.",
        f"Unset it, or set it to {variable.default}." if variable.only else "Unset it.",
    )


def _parses(kind: Kind, text: str) -> bool:
    if kind == "bool":
        return text in ("0", "1")
    if kind == "text":
        return bool(text.strip())
    try:
        (int if kind == "int" else float)(text)
    except ValueError:
        return False
    return True


def _op_of(name: str, text: str) -> str:
    op = name.removeprefix(KERNEL_PREFIX)
    if not op or op != op.upper() or not text.strip():
        raise EnvError(
            f"{name}={text!r} does not name an op and a kernel.",
            "DEEPINFER_KERNEL_<OP> takes the op in capitals and a kernel's name as its value.",
            "Run `deepinfer doctor` for the table of ops and kernels, or unset it.",
        )
    return op.lower()


def _unknown(name: str) -> EnvError:
    near = difflib.get_close_matches(name, VARIABLES, 1)
    return EnvError(
        f"{name} is not a variable of this engine.",
        "A misspelt variable that is ignored would leave the run in another mode than asked.",
        f"Did you mean {near[0]}?" if near else "Unset it.",
    )
