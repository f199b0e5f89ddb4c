"""From a sample to the pieces of its prompt and of its whole conversation, through the renderer."""

from deepinfer_jax.skills.sample import Sample
from deepinfer_jax.text.chat import Rendered, render
from deepinfer_jax.text.tokenizer import Piece


def prompt(sample: Sample) -> Rendered:
    """The prompt that the model answers with the sample's final assistant turn."""
    return render(
        sample.messages[:-1],
        thinking=sample.thinking,
        effort=sample.effort,
        tools=sample.tools,
        response_format=sample.response_format,
    )


def conversation(sample: Sample) -> tuple[Piece, ...]:
    """The pieces of prompt and final turn: what training sees.

    The pieces of `prompt` are a prefix; reasoning (in thinking mode), answer or tool calls and
    the end-of-sentence token follow.
    """
    return render(
        sample.messages,
        thinking=sample.thinking,
        effort=sample.effort,
        tools=sample.tools,
        response_format=sample.response_format,
        add_generation_prompt=False,
    ).pieces


def completion(sample: Sample) -> tuple[Piece, ...]:
    """The pieces that the model itself writes in the final turn, the last one EOS."""
    return conversation(sample)[len(prompt(sample).pieces) :]
