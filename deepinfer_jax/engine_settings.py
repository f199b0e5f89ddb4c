"""From settings and a network to an engine: its sizes, what prefixes share, bounded replay."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from deepinfer_jax.assembly import Assembled, host_memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.drafting import Drafting
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.engine.prefix import Reuse, replay, root_key
from deepinfer_jax.engine.programs import Report
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cache import PAGE, pages_of
from deepinfer_jax.model.transformer import decoder_start
from deepinfer_jax.report.plan import MemoryPlan, page_updates
from deepinfer_jax.runner.step import StepOptions
from deepinfer_jax.settings import EngineConfig


def check_replay(asked: EngineConfig, config: ModelConfig, drafts: int = 0) -> None:
    """Refuse bounded replay of the decoder that this network cannot run, or that keeps too little.

    At least a window and the positions that rejected drafts take back must stay: as many as rings
    keep with so many `drafts` of a step.

    Raises:
        ConfigError: with the numbers.
    """
    mode, keep = asked.prefill_truncation, asked.prefill_keep_tokens
    back = asked.backtracking(drafts)
    least = config.sliding_window + back
    names = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS (engine.prefill_keep_tokens)"
    if mode == "off" and keep:
        raise ConfigError(
            f"{names} is {keep}, but prefill truncation is off.",
            "Every prompt token runs through every layer, so the number would change nothing.",
            "Set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE to mask or compact, or the number to 0.",
        )
    if mode == "off":
        return
    if keep < least:
        raise ConfigError(
            f"{names} is {keep}; with truncation mode {mode} at least {least} are needed.",
            f"The decoder's window is {config.sliding_window} tokens, and {back} more must "
            "stay for drafts that are rejected.",
            f"Set it to {least} or more; 140 is the published value for a window of 128.",
        )
    first = decoder_start(config)
    late = [layer for layer in config.engram_layer_ids if layer >= first]
    if late:
        raise ConfigError(
            f"Prefill truncation is {mode}, but layers {late} of the decoder have Engram memory.",
            f"The decoder begins at layer {first}, and its memory needs every token of a prompt.",
            "Set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=off for this network.",
        )


def limits_of(plan: MemoryPlan, config: ModelConfig) -> Limits:
    """The engine's sizes: those that were planned."""
    back = config.engram_max_ngram_size - 1
    return Limits(
        slots=plan.slots,
        rows=plan.rows,
        pages=1 + plan.pages,
        max_model_len=plan.positions,
        table_pages=pages_of(plan.positions),
        updates=page_updates(plan.slots, plan.positions),
        look_back=back + back % 2,
        drafts=plan.drafts,
        backtrack=plan.backtrack,
    )


def reuse_of(asked: EngineConfig, net: Assembled) -> Reuse | None:
    """How prefixes are shared, or None. A mode of its own is a key space of its own."""
    mode, config = asked.prefix_reuse, net.network.config
    if mode == "off":
        return None
    last_source = max(config.kv_source_layer_ids, default=0)
    space = {
        "weights": net.digest,
        "arithmetic": net.network.arithmetic.name,
        "kernels": [(row.op, row.kernel) for row in net.network.ops.rows()],
        "page": PAGE,
        "approximate": mode == "bounded",
    }
    return Reuse(
        mode=cast(Any, mode),
        replay=replay(
            cast(Any, mode), config.sliding_window, config.num_hidden_layers, last_source
        ),
        root=root_key(json.dumps(space, sort_keys=True).encode(), b""),
    )


def make_engine(
    asked: EngineConfig,
    net: Assembled,
    token_map: np.ndarray,
    drafting: Drafting = Drafting(),  # noqa: B008 - frozen
    kept: Path | None = None,
    report: Report | None = None,
) -> Engine:
    """An engine on an assembled network.

    Args:
        asked: the settings; checked by `check_replay` before.
        net: the network on its device.
        token_map: int32 [vocab], compressed token ids.
        drafting: what is drafted; `net` has a drafter for it, and its plan has as many drafts.
        kept: folder of compiled programs, or None.
        report: called after each program is compiled.
    """
    return Engine(
        net.network,
        net.params,
        net.mesh,
        limits=limits_of(net.plan, net.network.config),
        options=StepOptions(
            draw=cast(Any, asked.sampler),
            logprobs=cast(Any, asked.logprobs_mode),
            truncate=cast(Any, asked.prefill_truncation),
            first_exact=asked.prefill_first_exact,
            verification=cast(Any, asked.verification),
            confidence_temperature=drafting.temperature,
            varlen=asked.varlen,
        ),
        overlap=asked.overlap,
        keep=asked.prefill_keep_tokens,
        reuse=reuse_of(asked, net),
        host_pages=asked.swap_pages,
        memory=host_memory(net, token_map) if net.tables else None,
        report=report,
        kept=kept,
        late_compile=cast(Any, asked.late_compile),
    )
