"""What is drafted: settings and a checkpoint make a number of drafts, or an error that says why."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.settings import EngineConfig

_NEXTN = "DEEPINFER_USE_NEXTN_DECODE (engine.nextn)"
_TEMPERATURE = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE (engine.confidence_temperature)"
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Drafting:
    """What every sequence has drafted.

    Attributes:
        count: drafts of a step, 0 for none.
        temperature: of the confidence of each of them.
    """

    count: int = 0
    temperature: tuple[float, ...] = ()


def drafting_of(
    asked: EngineConfig, config: ModelConfig, folder: Path | None, *, assumed: bool = False
) -> Drafting:
    """How much an engine drafts.

    Args:
        asked: its settings.
        config: of the network.
        folder: of the weights, of which only the names are read; None for a network without.
        assumed: weights that are not there have the drafter that the config describes, for plans.

    Raises:
        ConfigError: more drafts than the block has or than there is a drafter for, drafts without
            Engram tables on the device, confidence temperatures of another number or out of
            range, or verification that depends on the batch where determinism was asked for.
    """
    count = _count(asked, config, folder, assumed)
    if asked.batch_invariant and asked.rule != "coupled":
        _check_apart(asked, count)
    if not count:
        return Drafting()
    return Drafting(count, _temperatures(asked.confidence_temperature, count))


def _check_apart(asked: EngineConfig, count: int) -> None:
    """Refuse what makes the number of verified drafts depend on the other sequences."""
    own = asked.rule == "original"
    by, other = ("sampler", "stable") if own else ("verification", "coupled")
    if asked.varlen:
        raise ConfigError(
            f"engine.varlen is on with engine.{by}={asked.rule} and engine.batch_invariant.",
            "How many drafts are verified then depends on the other sequences, and with it the "
            f"random numbers that {asked.rule} uses.",
            f"Set DEEPINFER_ENABLE_MTP_VARLEN=0, or engine.{by}={other}.",
        )
    if count and asked.pages is not None:
        raise ConfigError(
            f"engine.pages is {asked.pages} with {count} drafts, engine.{by}={asked.rule} and "
            "engine.batch_invariant.",
            "A sequence that waits for a page, or gives its pages up, has other drafts verified "
            f"than by itself, and {asked.rule} then uses other random numbers.",
            f"Leave engine.pages out, which gives every sequence its own, or set "
            f"engine.{by}={other} or DEEPINFER_USE_NEXTN_DECODE=0.",
        )


def _count(asked: EngineConfig, config: ModelConfig, folder: Path | None, assumed: bool) -> int:
    block, wanted = config.dspark_block_size, asked.nextn
    if wanted == 0:
        return 0
    there = bool(config.num_nextn_predict_layers)
    absent = folder is None or (folder.is_dir() and not any(folder.glob("*.safetensors")))
    if there and not (absent and assumed):
        names = () if folder is None else open_checkpoint(folder).tensors
        there = any(name.startswith("mtp.") for name in names)
    if wanted is None:
        return block if there and asked.engram == "device" else 0
    if not there:
        raise ConfigError(
            f"{_NEXTN} is {wanted}, and the checkpoint has no drafter.",
            "Drafts come from the mtp.* weights, which this one left out.",
            "Set it to 0, leave it out, or use a checkpoint with a drafter.",
        )
    if wanted > block:
        raise ConfigError(
            f"{_NEXTN} is {wanted}; the drafter was trained on blocks of {block}.",
            "All rows of a block see each other, so a wider one is none that it knows.",
            f"Set it to {block} or less.",
        )
    if asked.engram != "device":
        raise ConfigError(
            f"{_NEXTN} is {wanted}, and the Engram tables are not on the device "
            f"(engine.engram={asked.engram}).",
            "The host would have to know every draft before it could look its memory up.",
            "Set engine.engram=device, or DEEPINFER_USE_NEXTN_DECODE=0.",
        )
    return wanted


def _temperatures(text: str, count: int) -> tuple[float, ...]:
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        given = []
    if len(given) == 1:
        given *= count
    if len(given) == count and all(_LEAST_TEMPERATURE <= t < float("inf") for t in given):
        return tuple(given)
    raise ConfigError(
        f"{_TEMPERATURE} is {text!r}.",
        f"It is one number, or one for each of {count} drafts, each at least "
        f"{_LEAST_TEMPERATURE:g}.",
        "Write for example 1.0, or as many numbers as there are drafts, with commas between them.",
    )
