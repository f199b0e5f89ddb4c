"""A step in a file: its state, inputs and results, so that it can be run again bit for bit.

The file is a NumPy archive. `record` holds a JSON object as bytes (uint8); every other array is a
leaf, named `state.`, `inputs.` or `outputs.` and its place in that tree. NumPy has no file format
for types such as bfloat16, so their leaves are stored as bytes, with type and shape in the object.
"""

import dataclasses
import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.files import replacing
from deepinfer_jax.runner.layout import Bucket, ProgramKey
from deepinfer_jax.runner.schedule import StepInput

Arrays = dict[str, np.ndarray]
_FORMAT, _HEAD = 1, "record"
_PARTS = ("state", "inputs", "outputs")


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: its number among those launched since the recording began, from 1.
        key: of its program.
        about: what its network is made again from and held against, plain JSON values.
        state: leaves before the step, by name.
        inputs: leaves of `StepInput`.
        outputs: leaves of `StepOutput`; None when the step did not come to its end.
        after: SHA-256 of each leaf of the state after the step; None with `outputs`.
    """

    step: int
    key: ProgramKey
    about: Mapping[str, Any]
    state: Arrays
    inputs: Arrays
    outputs: Arrays | None = None
    after: dict[str, str] | None = None


@dataclass(frozen=True)
class Difference:
    """Where two runs of a step part.

    Attributes:
        leaf: its name.
        index: of the element; None where a whole leaf is compared by its digest or its type.
        recorded, replayed: values with their bits, digests or types.
    """

    leaf: str
    index: tuple[int, ...] | None
    recorded: str
    replayed: str


class Recorder:
    """Writes chosen steps of a run into `folder`, as `step-{number}.npz`.

    Attributes:
        missing: steps that were chosen and have not come.
        launched: steps so far.
    """

    def __init__(self, folder: Path, steps: Iterable[int], about: Mapping[str, Any]):
        """Choose steps.

        Args:
            folder: made if it does not exist.
            steps: numbers; the next step is the first, 1.
            about: see `StepRecord`.

        Raises:
            ConfigError: the folder cannot be written, or holds such a step already.
        """
        self.missing, self.launched = set(steps), 0
        self._folder, self._about = folder, about
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
        for step in sorted(self.missing):
            if self.path(step).exists():
                raise ConfigError(
                    f"{self.path(step)} exists.",
                    "It is the step of another run, and is never replaced.",
                    "Name another folder, or remove the file.",
                )

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self._folder / f"step-{step}.npz"

    def around(self, program: Callable[..., Any], key: ProgramKey) -> Callable[..., Any]:
        """The program of the next step; of a chosen one, it also writes the file.

        It is written before the step is launched, so that it is there when the step never ends,
        and once more with the results, for which it waits.
        """
        self.launched += 1
        step = self.launched
        if step not in self.missing:
            return program

        def run(params: Any, state: Any, inputs: Any) -> Any:
            # Copied before the launch: the step donates the state.
            begun = StepRecord(step, key, self._about, leaves(state), leaves(inputs))
            self._write(begun)
            state, out = program(params, state, inputs)
            self._write(_with_results(begun, state, out))
            self.missing.discard(step)
            return state, out

        return run

    def _write(self, record: StepRecord) -> None:
        try:
            write_record(self.path(record.step), record)
        except OSError as error:
            raise _unwritable(self._folder, error) from None


def leaves(tree: Any) -> Arrays:
    """Copies of the leaves of a tree in the host's memory, by name."""
    found, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))
    return {_name(path): np.array(leaf, copy=True) for path, leaf in found}


def digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """SHA-256 over type, shape and bytes of each array, in hexadecimal."""
    return {name: _digest(array) for name, array in arrays.items()}


def write_record(path: Path, record: StepRecord) -> None:
    """Write the file whole; its folder must exist. Raises OSError as writing does."""
    arrays: Arrays = {}
    raw: dict[str, Any] = {}
    for part in _PARTS:
        for name, array in (getattr(record, part) or {}).items():
            place = f"{part}.{name}"
            if array.dtype.isbuiltin != 1:
                raw[place] = [array.dtype.name, list(array.shape)]
                array = np.frombuffer(array.tobytes(), np.uint8)
            arrays[place] = array
    head = {
        "format": _FORMAT,
        "step": record.step,
        "bucket": dataclasses.asdict(record.key.bucket),
        "top": record.key.top,
        "prompt": record.key.prompt,
        "about": record.about,
        "finished": record.outputs is not None,
        "after": record.after,
        "raw": raw,
    }
    arrays[_HEAD] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_record(path: Path) -> StepRecord:
    """The step of a file. Raises RequestError when it is none."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            found = {name: file[name] for name in file.files}
        head = json.loads(found.pop(_HEAD).tobytes())
        if head["format"] != _FORMAT:
            raise ValueError(f"its format is {head['format']}, and this is {_FORMAT}")
        for place, (dtype, shape) in head["raw"].items():
            found[place] = found[place].view(getattr(ml_dtypes, dtype)).reshape(shape)
        parts = {part: _part(found, part) for part in _PARTS}
        return StepRecord(
            step=head["step"],
            key=ProgramKey(Bucket(**head["bucket"]), head["top"], head["prompt"]),
            about=head["about"],
            state=parts["state"],
            inputs=parts["inputs"],
            outputs=parts["outputs"] if head["finished"] else None,
            after=head["after"],
        )
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RequestError(
            f"{path} holds no recorded step ({type(error).__name__}: {reason}).",
            "A replay needs a step's state, inputs and results, as --record-step writes them.",
            "Check the path, or record the step again.",
        ) from None


def replayed(
    record: StepRecord, program: Callable[..., Any], params: Any, shapes: Any
) -> StepRecord:
    """The record of `program` on a recorded state and inputs.

    Args:
        record: what is run again.
        program: compiled for its bucket.
        params: of the network.
        shapes: the state that the program takes, as shapes and dtypes.

    Raises:
        RequestError: a leaf of the state or the inputs is not what the program takes.
    """
    state = _state(record.state, shapes)
    ints, floats = record.key.bucket.empty()
    for name, empty in (("ints", ints), ("floats", floats)):
        _check(f"inputs.{name}", record.inputs.get(name), empty)
    memory = [array for name, array in record.inputs.items() if name.startswith("memory.")]
    inputs: Any = StepInput(
        record.inputs["ints"],  # type: ignore[arg-type]
        record.inputs["floats"],  # type: ignore[arg-type]
        tuple(memory) or None,  # type: ignore[arg-type]
    )
    return _with_results(record, *program(params, state, inputs))


def first_difference(recorded: StepRecord, here: StepRecord) -> Difference | None:
    """The first leaf in which the results differ by a bit, outputs first; None if none does.

    Both must have come to their end.
    """
    assert recorded.outputs is not None and recorded.after is not None
    assert here.outputs is not None and here.after is not None
    for name in dict.fromkeys((*recorded.outputs, *here.outputs)):
        found = _difference(name, recorded.outputs.get(name), here.outputs.get(name))
        if found is not None:
            return found
    for name in dict.fromkeys((*recorded.after, *here.after)):
        was, now = recorded.after.get(name, "missing"), here.after.get(name, "missing")
        if was != now:
            return Difference(f"state.{name}", None, was, now)
    return None


def _with_results(record: StepRecord, state: Any, out: Any) -> StepRecord:
    return dataclasses.replace(record, outputs=leaves(out), after=digests(leaves(state)))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _part(found: Mapping[str, np.ndarray], part: str) -> Arrays:
    start = f"{part}."
    return {n.removeprefix(start): a for n, a in found.items() if n.startswith(start)}


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype.name} {list(array.shape)} ".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def _state(arrays: Arrays, shapes: Any) -> Any:
    wanted, tree = jax.tree_util.tree_flatten_with_path(shapes)
    names = [_name(path) for path, _ in wanted]
    for (_, shape), name in zip(wanted, names, strict=True):
        _check(f"state.{name}", arrays.get(name), shape)
    return jax.tree.unflatten(tree, [arrays[name] for name in names])


def _check(name: str, array: np.ndarray | None, wanted: Any) -> None:
    if _kind(array) != _kind(wanted):
        raise RequestError(
            f"{name} of the recorded step is {_kind(array)}.",
            f"The program here takes {_kind(wanted)}.",
            "Replay it with the model, the settings and the version that recorded it.",
        )


def _kind(array: Any) -> str:
    return "missing" if array is None else f"{np.dtype(array.dtype).name} {list(array.shape)}"


def _difference(name: str, was: np.ndarray | None, now: np.ndarray | None) -> Difference | None:
    leaf = f"outputs.{name}"
    if was is None or now is None or _kind(was) != _kind(now):
        return Difference(leaf, None, _kind(was), _kind(now))
    if not was.size:
        return None
    # Bits, not values: NaN equals itself, and 0 is not -0.
    bits = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (was, now)]
    differs = (bits[0] != bits[1]).reshape(was.size, -1).any(-1)
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), was.shape))
    return Difference(leaf, index, _shown(was[index]), _shown(now[index]))


def _shown(value: Any) -> str:
    return f"{value.item()} (0x{value.tobytes()[::-1].hex()})"


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{folder} cannot be written: {error.strerror or error}.",
        "Recorded steps go there.",
        "Name a folder that can be written, with room for the state of all sequences.",
    )
