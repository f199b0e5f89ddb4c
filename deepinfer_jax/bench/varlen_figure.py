"""The picture of a simulation of variable verification lengths, beside the published figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

FORMATS = ("svg", "png")


def check_can_draw(path: Path) -> str:
    """The format that `path` asks for; before anything is computed.

    Raises ConfigError for another ending than .svg or .png, or when matplotlib is missing.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(
            f"{path} does not end in {' or '.join(f'.{name}' for name in FORMATS)}.",
            "The ending says how the figure is drawn.",
            "Name for example varlen.svg.",
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "The figure needs matplotlib, which is not installed.",
            "It is an optional dependency.",
            "Run: pip install 'deepinfer-jax[plots]'.",
        ) from None
    return kind


def draw(report: Mapping[str, Any], path: Path, kind: str) -> None:
    """Draw what `simulate_varlen.simulate` returned to `path`, as `kind`.

    What the curves rest on stands in the figure, since a chart without it misleads.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    curve, published = report["curve"], report["published"]
    loads = [row["load"] for row in curve]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    figure.suptitle("Variable against fixed verification lengths: simulated, not measured")
    left, right = figure.subplots(1, 2)
    left.plot(loads, [100 * row["gain"] for row in curve], label="simulated")
    for load, (low, high) in published["gain"].items():
        middle, half = 50 * (low + high), 50 * (high - low)
        left.errorbar(
            [int(load)],
            [middle],
            yerr=[half],
            fmt="o",
            color="black",
            label="published" if load == min(published["gain"], key=int) else None,
        )
    left.axhline(0, color="gray", linewidth=0.8)
    left.set(xlabel="sequences per device", ylabel="gain in throughput (%)")
    left.legend()
    right.plot(loads, [row["verified"] for row in curve], label="drafts verified")
    right.plot(loads, [row["accept_length"] for row in curve], label="accept length")
    right.plot(
        loads, [row["fixed_accept_length"] for row in curve], "--", label="accept length, fixed"
    )
    low, high = published["dynamic"]["verified"]
    right.axhspan(low, high, alpha=0.15, label="drafts verified, published range")
    right.set(xlabel="sequences per device", ylabel="per step and sequence")
    right.legend(fontsize="small")
    settings = report["settings"]
    said = ", ".join(f"{p['name']} {p['value']:.3g} {p['origin']}" for p in report["parameters"])
    figure.supxlabel(
        f"{said}; {settings['drafts']} drafts, lag {settings['lag']}, seed {settings['seed']}",
        fontsize="small",
    )
    # The same figures give the same bytes, and text stays text.
    metadata = {"Date": None} if kind == "svg" else None
    with rc_context({"svg.hashsalt": "deepinfer", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, format=kind, metadata=metadata)
