"""`python -m deepinfer_jax.bench.golden_errors DIR`: largest errors against the reference data.

DIR is the complete folder of golden arrays: config.json, model_release.safetensors, engram.npz,
p40_*.npz, p300_*.npz, decode_*.npz.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepinfer_jax.assembly import Assembled, assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.report.compare import compare
from deepinfer_jax.runner.trace import Arrays, TraceInput, run_trace
from deepinfer_jax.settings import EngineConfig

LOG = logging.getLogger("deepinfer_jax.bench")
_MODES = ("f32", "f32qdq", "release")
_FILES = ("p40", "p300", "decode_p3_t24", "decode_p40_t64", "decode_p280_t300")


def _load(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _trace(net: Assembled, arrays: Arrays) -> Arrays:
    given = TraceInput.from_arrays(arrays, net.network.config.vocab_size)
    return run_trace(net.params, given, net.network, net.mesh)


def row(name: str, mode: str, made: Arrays, expected: Arrays, layered: Arrays | None) -> str:
    """One line of the table."""
    shared = {k: v for k, v in expected.items() if k in made}
    floats = [k for k in shared if shared[k].dtype.kind == "f"]
    largest = max(float(np.abs(made[k] - shared[k]).max()) for k in floats)
    logits = made["logits"] - expected["logits"]
    agree = np.mean(made["logits"].argmax(-1) == expected["logits"].argmax(-1))
    chosen = [k for k in shared if k.endswith("topk")]
    same = np.mean([np.mean(np.all(made[k] == shared[k], -1)) for k in chosen])
    inner = "-"
    if layered is not None:
        streams = [k for k in expected if k.endswith(".stream")]
        worst = max(
            float(np.sqrt(np.mean((layered[k] - expected[k]) ** 2) / np.mean(expected[k] ** 2)))
            for k in streams
        )
        inner = f"{worst:.1e}"
    return (
        f"| {name} | {mode} | {largest:.1e} | {np.sqrt(np.mean(logits**2)):.1e} | "
        f"{100 * agree:.1f} % | {100 * same:.1f} % | {inner} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command; the table goes to the log."""
    parser = argparse.ArgumentParser(description="Errors against the golden arrays.")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder: Path = given.folder
    config = ModelConfig.from_file(folder)
    token_map = np.load(folder / "engram.npz")["tiny_token_map"]
    LOG.info("| data | mode | largest error | logits rms | same argmax | same selections | layer |")
    LOG.info("| --- | --- | --- | --- | --- | --- | --- |")
    for mode in _MODES:
        engine = EngineConfig(model=str(folder), arithmetic=mode)
        net = assemble(folder / "model_release.safetensors", config, engine, token_map, traced=True)
        for name in _FILES:
            expected = _load(folder / f"{name}_{mode}.npz")
            expected = {k: v for k, v in expected.items() if not k.startswith("spec_")}
            asked = {k: v for k, v in expected.items() if k in ("token_ids", "prefill_len")}
            made = _trace(net, asked)
            layered = None
            if name == "p40":
                inner = {k: v for k, v in expected.items() if k.endswith((".stream", ".pre_next"))}
                layered = _trace(net, asked | inner)
            LOG.info(row(name, mode, made, expected, layered))
            first = compare(made, expected, tolerance=1e-4)[:1]
            if mode == "f32" and first:
                LOG.info(f"first array beyond 1e-4: {first[0].name}")


if __name__ == "__main__":
    main()
