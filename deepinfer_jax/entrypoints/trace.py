"""`deepinfer trace`: a forward's inside as arrays, two traces compared, sampler rows redone."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.assembly import assemble, engram_memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.progress import loading
from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.model.engram_hash import engram_hash, hash_rows
from deepinfer_jax.report.compare import compare
from deepinfer_jax.runner.compile import compiled
from deepinfer_jax.runner.trace import TraceInput, run_trace
from deepinfer_jax.sampling.recompute import recompute
from deepinfer_jax.text.compressed_ids import check_compressed_map, compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer

_SHOWN = 12  # differing arrays listed by --compare


def command(
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Model folder or weights file.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--input", metavar="IN.npz", help="token_ids and options.")
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
        float, typer.Option("--tolerance", help="Absolute difference that counts as equal.")
    ] = 0.0,
    sampler: Annotated[
        bool, typer.Option("--sampler", help="Recompute token, accepted, kept of sampler rows.")
    ] = False,
    overrides: options.Overrides = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Write a trace, compare two, or recompute sampler rows. --compare exits 1 on a difference."""
    if pair is not None:
        return _compare(pair, tolerance, as_json)
    if source is None or output is None:
        raise ConfigError(
            "trace has no --input or no --output.",
            "It reads arrays from one .npz file and writes arrays to another.",
            "Add --input IN.npz --output OUT.npz, or use --compare A.npz B.npz.",
        )
    arrays = _read(source)
    if sampler:
        made = recompute(arrays, compiled)
    else:
        made = _forward(model, arrays, mode, overrides or [], quiet)
    _write(output, made)
    if as_json:
        print(json.dumps({name: list(value.shape) for name, value in made.items()}))
    else:
        print(f"wrote {output}: {len(made)} arrays")
    return 0


def _forward(
    model: str | None,
    arrays: dict[str, np.ndarray],
    mode: str | None,
    overrides: list[str],
    quiet: bool,
) -> dict[str, np.ndarray]:
    explicit = {} if mode is None else {"arithmetic": mode}
    weights = None if model is None else Path(model)
    if weights is not None and weights.is_file():
        explicit["model"] = str(weights.parent)
    elif model is not None:
        explicit["model"] = model
    asked = settings.load(None, overrides, env=environment.read(), explicit=explicit)
    config, folder = asked.model_config(), asked.folder
    assert folder is not None, "without a config file the model is a folder"
    token_map = _token_map(folder, config, arrays)
    with loading(quiet) as progress:
        net = assemble(
            weights if weights is not None and weights.is_file() else folder,
            config,
            asked.engine,
            token_map,
            traced=True,
            progress=progress,
        )
    given = TraceInput.from_arrays(arrays, config.vocab_size)
    memory = None
    if net.tables:
        compressed = token_map[given.token_ids[0]]
        if config.image_token_id is not None:
            compressed = np.where(given.token_ids[0] == config.image_token_id, -1, compressed)
        pad = int(token_map[config.engram_pad_token_id])
        rows = hash_rows(engram_hash(config), compressed, pad)
        dtype = net.network.arithmetic.dtype

        def look_up(start: int, stop: int) -> tuple[np.ndarray, ...]:
            return engram_memory(net.tables, rows[start:stop], dtype)

        memory = look_up

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
    whole = np.zeros(config.vocab_size, np.int32)
    whole[: len(token_map)] = token_map
    return whole


def _compare(pair: tuple[Path, Path], tolerance: float, as_json: bool) -> int:
    a, b = map(_read, pair)
    rows = compare(a, b, tolerance=tolerance)
    only = {"a": sorted(set(a) - set(b)), "b": sorted(set(b) - set(a))}
    if as_json:
        print(json.dumps({"differ": [dataclasses.asdict(r) for r in rows], "only": only}))
    elif not rows:
        print(f"equal: {len(set(a) & set(b))} arrays within {tolerance:g}")
    else:
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
    return 1 if rows else 0


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as .npz ({type(error).__name__}: {error}).",
            "trace reads and writes NumPy archives.",
            "Check the path and the file.",
        ) from None


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **cast(Any, arrays))
    os.replace(temporary, path)
