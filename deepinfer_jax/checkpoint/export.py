"""Writing a model folder in either spelling: float weights in, `model.safetensors` out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.checkpoint.formats import encode_q4, encode_q8, encode_rows
from deepinfer_jax.checkpoint.inventory import Spelling, TensorSpec, inventory, scale_name
from deepinfer_jax.checkpoint.safetensors import DTYPES, TOKENIZER_KEY, write_safetensors
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing

_ENCODE = {"q8": encode_q8, "q4": encode_q4, "engram_table": encode_rows}


def encode(
    weights: Mapping[str, np.ndarray],
    config: ModelConfig,
    *,
    drafter: bool,
    spelling: Spelling = "release",
) -> dict[str, np.ndarray]:
    """The stored tensors for float `weights` (one per name of `inventory(config, drafter)`).

    As `encode_tensors`.
    """
    return encode_tensors(weights, inventory(config, drafter=drafter), spelling=spelling)


def encode_tensors(
    weights: Mapping[str, np.ndarray],
    specs: Mapping[str, TensorSpec],
    *,
    spelling: Spelling = "release",
) -> dict[str, np.ndarray]:
    """The stored tensors for float `weights`, one per name of `specs`.

    In the `release` spelling linears, experts and Engram tables are quantized and get scales; in
    the `dequantized` one they are rounded to BF16. Other tensors take the release's own type.
    Raises CheckpointError naming every weight that is missing, unexpected or of another shape.
    """
    problems = [f"{n} is missing" for n in sorted(set(specs) - set(weights))]
    problems += [f"{n} is unexpected" for n in sorted(set(weights) - set(specs))]
    problems += [
        f"{n} is {list(weights[n].shape)}, not {list(specs[n].shape)}"
        for n in sorted(set(specs) & set(weights))
        if weights[n].shape != specs[n].shape
    ]
    if problems:
        raise CheckpointError(
            f"The weights do not fit the config in {len(problems)} places: {'; '.join(problems)}.",
            "The file would be refused when it is loaded.",
            "Pass the weights of this very config, with the drafter's exactly when it is written.",
        )
    stored: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        if spec.kind == "plain" or spelling == "dequantized":
            stored[name] = weights[name].astype(DTYPES[spec.dtypes[0]])
            continue
        spec.stored(name, spelling)  # refuses widths without whole blocks, by name
        codes, scales = _ENCODE[spec.kind](weights[name])
        stored[name] = codes.view(np.int8) if spec.kind == "q4" else codes
        stored[scale_name(name)] = scales
    return stored


def export(
    folder: str | Path,
    weights: Mapping[str, np.ndarray],
    config_json: Mapping[str, Any],
    *,
    drafter: bool,
    spelling: Spelling = "release",
    tokenizer_sha256: str | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json` (the object `config_json`) into `folder`.

    `tokenizer_sha256`, 64 hexadecimal digits, is of the tokenizer.json that the weights were
    trained with; they are then refused beside any other (`Checkpoint.check_tokenizer`).

    The folder is made if need be; each file is written under a temporary name and renamed, the
    weights first. Returns the folder. Errors as `encode`, and ConfigError for a bad config.
    """
    config = ModelConfig.from_dict(config_json)
    stored = encode(weights, config, drafter=drafter, spelling=spelling)
    metadata = {"format": spelling}
    if tokenizer_sha256 is not None:
        metadata[TOKENIZER_KEY] = tokenizer_sha256
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", stored, metadata=metadata)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config_json, indent=1))
    return folder
