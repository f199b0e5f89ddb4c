"""The loss curve: rows of `loss.csv`, and `loss.png` drawn from them.

`python -m deepinfer_jax.training.curve FOLDER` draws the picture again.
"""

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.files import replacing

TABLE = "loss.csv"
PICTURE = "loss.png"
Row = Mapping[str, float | int | str]


def read(folder: Path) -> list[dict[str, str]]:
    """Rows of the folder's table; none when there is no table."""
    path = folder / TABLE
    return list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else []


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Replace the folder's table; columns are those of any row, empty where a row has none."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    with replacing(folder / TABLE) as temporary:
        temporary.write_text(text.getvalue())


def draw(folder: Path) -> Path:
    """Draw losses, gradient norm and largest logit over steps into the folder.

    Raises ConfigError when matplotlib is missing or the table is empty.
    """
    rows = read(folder)
    if not rows:
        raise ConfigError(
            f"{folder / TABLE} has no rows.",
            "The curve is drawn from the log of a run.",
            "Train first, or give the folder of a run.",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "The loss curve needs matplotlib, which is not installed.",
            "It is an optional dependency.",
            "Run: pip install 'deepinfer-jax[plots]'.",
        ) from None
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for column, label in (
        ("short", "answers, short rows"),
        ("long", "answers, long rows"),
        ("index", "index"),
    ):
        points = [(int(r["step"]), float(r[column])) for r in rows if r.get(column)]
        if points:
            upper.plot(*zip(*points, strict=True), label=label, linewidth=1)
    upper.set(yscale="log", ylabel="loss (nats per token)")
    upper.legend()
    for column, label in (("norm", "gradient norm"), ("peak", "largest attention logit")):
        points = [(int(r["step"]), float(r[column])) for r in rows if r.get(column)]
        lower.plot(*zip(*points, strict=True), label=label, linewidth=1)
    lower.set(yscale="log", xlabel="step")
    lower.legend()
    with replacing(folder / PICTURE) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return folder / PICTURE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw loss.png from loss.csv.")
    parser.add_argument("folder", type=Path)
    draw(parser.parse_args().folder)
