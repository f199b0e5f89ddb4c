"""`deepinfer trace`: a forward's inside as arrays, two traces compared, sampler rows redone."""

import dataclasses
import math
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.assembly import assemble, host_memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json, writing
from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.report.compare import Row, compare
from deepinfer_jax.report.plan import max_length
from deepinfer_jax.runner.compile import compiled
from deepinfer_jax.runner.trace import TraceInput, run_trace
from deepinfer_jax.sampling.recompute import recompute
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer

_SHOWN = 12  # arrays listed by --compare


def command(
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Model folder or weights file.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="IN.npz",
            help="token_ids [1, tokens]. Optional: prefill_len, whose rest is decoded token by "
            "token; engram_token_map [vocab], instead of the tokenizer's; and L{l}.stream with "
            "L{l}.pre_next, which replace what leaves layer l. With --sampler: a recording.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="OUT.npz", help="Where the arrays go.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="f32|f32qdq|release", help="Arithmetic.")
    ] = None,
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A.npz B.npz", help="Name the first difference."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Absolute difference that counts as equal; 0 without."),
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="An array of one trace only is no difference.")
    ] = False,
    sampler: Annotated[
        bool, typer.Option("--sampler", help="Recompute token, accepted, kept of sampler rows.")
    ] = False,
    config: options.Config = None,
    overrides: options.Overrides = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Write a trace, compare two, or recompute sampler rows. --compare exits 1 on a difference."""
    network = {"--model": model, "--mode": mode, "--config": config, "--set": overrides}
    files = {"--input": source, "--output": output, "--sampler": sampler or None}
    limits = {"--tolerance": tolerance, "--common": common or None}
    if out is not None:
        check_can_write(out)
    if pair is not None:
        _refuse("--compare", files | network, "It reads two traces that exist, and runs nothing.")
        return _compare(pair, _legal(tolerance), common, out, as_json)
    if given := _given(limits):
        raise ConfigError(
            f"{' and '.join(given)} without --compare.",
            "It says when two traces count as equal.",
            "Add --compare A.npz B.npz, or leave it out.",
        )
    if sampler:
        _refuse("--sampler", network, "The rows are redone from their seeds, without a network.")
    if source is None or output is None:
        raise ConfigError(
            "trace has no --input or no --output.",
            "It reads arrays from one .npz file and writes arrays to another.",
            "Add --input IN.npz --output OUT.npz, or use --compare A.npz B.npz.",
        )
    check_can_write(output)
    arrays = _read(source)
    with Live(quiet) as live:
        if sampler:
            live.doing("recomputing")
            made = recompute(arrays, compiled)
        else:
            made = _forward(model, arrays, mode, config, overrides or [], live)
    with writing(output) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **cast(Any, made))
    report = {name: list(value.shape) for name, value in made.items()}
    if out is not None:
        write_json(out, report)
    print(json_text(report) if as_json else f"wrote {output}: {len(made)} arrays")
    return 0


def _given(options: dict[str, Any]) -> list[str]:
    return [name for name, value in options.items() if value is not None]


def _refuse(which: str, others: dict[str, Any], why: str) -> None:
    """Refuse the options among `others` that were given beside `which`."""
    if given := _given(others):
        raise ConfigError(
            f"{which} and {', '.join(given)} are given together.",
            why,
            f"Leave out {which}, or {', '.join(given)}.",
        )


def _legal(tolerance: float | None) -> float:
    if tolerance is None:
        return 0.0
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(
            f"--tolerance is {tolerance:g}.",
            "It is the largest absolute difference that counts as equal.",
            "Give a finite number that is not negative.",
        )
    return tolerance


def _forward(
    model: str | None,
    arrays: dict[str, np.ndarray],
    mode: str | None,
    config_name: str | None,
    overrides: list[str],
    live: Live,
) -> dict[str, np.ndarray]:
    explicit = {} if mode is None else {"arithmetic": mode}
    weights = None if model is None else Path(model)
    if weights is not None and weights.is_file():
        explicit["model"] = str(weights.parent)
    elif model is not None:
        explicit["model"] = model
    asked = settings.load(config_name, overrides, env=environment.read(), explicit=explicit)
    config, folder = asked.model_config(), asked.folder
    if folder is None:
        raise ConfigError(
            f"The config {asked.engine.model} describes a network, but no weights.",
            "A trace runs on weights.",
            "Name a model folder or a weights file with --model and another config.",
        )
    given = TraceInput.from_arrays(arrays, config.vocab_size)
    if given.alone:
        live.note(f"not injected, since the other half is missing: {', '.join(given.alone)}")
    given.check(config, max_length(asked.engine, config))
    token_map = _token_map(folder, config, arrays)
    net = assemble(
        weights if weights is not None and weights.is_file() else folder,
        config,
        asked.engine,
        token_map,
        traced=True,
        progress=live.report,
    )
    live.doing("compiling and computing")
    memory = host_memory(net, token_map) if net.tables else None
    return run_trace(net.params, given, net.network, net.mesh, memory)


def _token_map(folder: Path, config: ModelConfig, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The compressed ids from the input, or else from the folder's tokenizer."""
    if "engram_token_map" in arrays:
        token_map = np.asarray(arrays["engram_token_map"])
        if token_map.shape != (config.vocab_size,) or token_map.dtype.kind not in "iu":
            raise RequestError(
                f"engram_token_map is {token_map.dtype} of shape {list(token_map.shape)}.",
                f"It gives a compressed id to each of the {config.vocab_size} ids.",
                f"Give integers of shape [{config.vocab_size}].",
            )
        return token_map.astype(np.int32)
    if not (folder / "tokenizer.json").is_file():
        raise RequestError(
            f"{folder} has no tokenizer.json, and the input no engram_token_map.",
            "Engram looks up compressed token ids, which come from the tokenizer.",
            "Add tokenizer.json to the folder or engram_token_map to the input.",
        )
    token_map = compressed_token_map(Tokenizer.from_folder(folder, config))
    check_compressed_map(token_map, config)
    return token_map


def _compare(
    pair: tuple[Path, Path], tolerance: float, common: bool, out: Path | None, as_json: bool
) -> int:
    a, b = map(_read, pair)
    shared = set(a) & set(b)
    if not shared:
        raise ConfigError(
            f"{pair[0]} and {pair[1]} have no array in common: {len(a)} and {len(b)} arrays.",
            "Arrays are compared by name.",
            "Compare two traces of the same kind.",
        )
    rows = compare(a, b, tolerance=tolerance)
    only = {"a": sorted(set(a) - shared), "b": sorted(set(b) - shared)}
    report = {
        "compared": len(shared),
        "differ": [dataclasses.asdict(row) for row in rows],
        "only": only,
    }
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report))
    else:
        _show(rows, len(shared), tolerance)
        for path, names in zip(pair, only.values(), strict=True):
            if names:
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                print(f"only in {path}: {', '.join(names[:_SHOWN])}{more}")
    alone = not common and any(only.values())
    return FAILED if rows or alone else 0


def _show(rows: list[Row], compared: int, tolerance: float) -> None:
    if not rows:
        print(f"equal: {compared} arrays within {tolerance:g}")
        return
    first = rows[0]
    print(f"first difference: {first.name}, largest {first.max_abs:.3g} at {list(first.where)}")
    table = Table("array", "shape", "differing", "largest", "at", box=None)
    for row in rows[:_SHOWN]:
        table.add_row(
            row.name,
            str(list(row.shape)),
            str(row.differing),
            f"{row.max_abs:.3g}",
            str(list(row.where)),
        )
    Console().print(table)
    if len(rows) > _SHOWN:
        print(f"and {len(rows) - _SHOWN} more arrays")


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as opened:
            file = np.load(opened)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            with file:
                return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RequestError(
            f"{path} cannot be read as .npz ({type(error).__name__}: {reason}).",
            "trace reads and writes NumPy archives.",
            "Check the path and the file.",
        ) from None
