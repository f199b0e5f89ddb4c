"""The texts an engine is asked with: TOML files that extend one another, and `--set key=value`."""

import difflib
import importlib.resources
import os.path
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

TABLES = ("engine", "model")


def package_folder(name: str) -> Path:
    """The folder of packaged data `name` ("models", "configs").

    An installed wheel carries both inside the package; in a source tree `configs` lies beside it.
    """
    package = Path(str(importlib.resources.files("deepinfer_jax")))
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def config_names() -> tuple[str, ...]:
    """Names of the packaged configs."""
    return tuple(sorted(path.stem for path in package_folder("configs").glob("*.toml")))


def is_bare(name: str | Path) -> bool:
    """Whether `name` is a name alone, not a path such as `./nano` or `nano/`."""
    return Path(name).name == str(name)


def read(config: str | Path) -> tuple[str, dict[str, Any]]:
    """The name of a config and its content, laid over the config that it extends.

    Raises ConfigError for a config that does not exist or is no TOML of the tables in `TABLES`.
    """
    path = _find(config)
    content = _parse(path)
    base_name = content.pop("extends", None)
    if base_name is not None:
        local = path.parent / f"{base_name}.toml"
        base = _parse(local if local.is_file() else _find(base_name))
        if "extends" in base:
            raise ConfigError(
                f"{path} extends {base_name}, which extends {base['extends']}.",
                "One level keeps the origin of every value within two files.",
                f"Extend {base['extends']} and copy what {base_name} adds.",
            )
        if "model" in content.get("engine", {}):
            base.pop("model", None)
        content = _merged(base, content)
    described = set(content.get("model", {})) - {"allow_unknown"}
    if described and "model" in content.get("engine", {}):
        raise ConfigError(
            f"{path} sets engine.model and also describes a network in [model].",
            "An engine runs one network, and either could be meant.",
            "Remove engine.model or the [model] table.",
        )
    return path.stem, content


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _find(config: str | Path) -> Path:
    path = Path(os.path.expanduser(config))
    packaged = package_folder("configs") / f"{config}.toml"
    if is_bare(config) and packaged.is_file():
        return packaged
    if path.is_file():
        return path
    near = difflib.get_close_matches(str(config), config_names(), 1)
    raise ConfigError(
        f"There is no config {str(config)!r}: neither a packaged name nor a file.",
        f"The packaged configs are {', '.join(config_names())}.",
        f"Did you mean {near[0]}?" if near else "Name one of these or the path of a TOML file.",
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}).",
            "A config that is left out would configure another engine.",
            "Make it readable, or name another config.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}.",
            "A config that is read in part would configure another engine.",
            "Correct the file.",
        ) from None
    for key, value in content.items():
        if key not in ("extends", *TABLES):
            raise unknown_key(key, ("extends", *TABLES))
        kind, wanted = (dict, "a table") if key in TABLES else (str, "a config's name")
        if not isinstance(value, kind):
            raise illegal_value(key, value, "file", wanted)
    return content


def parse_overrides(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tables that texts `table.key=value` write; a value that is no TOML is plain text.

    Raises ConfigError for a text of another form, another table, or a key below a value.
    """
    tables: dict[str, dict[str, Any]] = {}
    for text in overrides:
        key, equals, literal = text.partition("=")
        path = key.strip().split(".")
        if not equals or len(path) < 2 or not all(path):
            raise ConfigError(
                f"--set {text} is not of the form table.key=value.",
                "Every override names the one key that it changes.",
                "Write for example --set engine.max_num_seqs=8.",
            )
        if path[0] not in TABLES:
            raise unknown_key(path[0], TABLES)
        value = _value(literal)
        table = tables.setdefault(path[0], {})
        for step in path[1:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise illegal_value(
                    key, value, "--set", "a key of a table that is not set as a whole"
                )
        table[path[-1]] = value
    return tables


def _value(literal: str) -> Any:
    try:
        content = tomllib.loads(f"value = {literal}")
    except tomllib.TOMLDecodeError:
        return literal.strip()
    # A text of several lines could hold further keys, which would be lost.
    return content["value"] if len(content) == 1 else literal.strip()


def illegal_value(key: str, value: Any, source: str, wanted: str) -> ConfigError:
    """The refusal of `key`'s value, which came from `source` and is not `wanted`."""
    return ConfigError(
        f"{key} is {value!r} ({source}), which is not {wanted}.",
        "A value that is guessed at would configure another engine.",
        f"Set it to {wanted}.",
    )


def unknown_key(key: str, legal: Iterable[str]) -> ConfigError:
    """The refusal of `key`, with the nearest of the legal ones."""
    names = list(legal)
    near = difflib.get_close_matches(key, names, 1)
    return ConfigError(
        f"There is no config key {key}.",
        "A misspelt key that is ignored would leave its default in force.",
        f"Did you mean {near[0]}?" if near else f"The keys here are {', '.join(names)}.",
    )
