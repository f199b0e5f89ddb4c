"""Training sees exactly the prompt that evaluation sends, followed by the model's own tokens."""

from pathlib import Path

import pytest

import deepinfer_jax
from deepinfer_jax.skills.conversation import completion, conversation, prompt
from deepinfer_jax.skills.families import SKILLS, sample
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Tokenizer

NANO = Path(deepinfer_jax.__file__).parent / "models" / "nano"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(NANO)


@pytest.mark.parametrize("skill", SKILLS)
def test_the_prompt_is_a_prefix_of_the_conversation_in_ids(skill, tokenizer):
    modes = set()
    for i in range(40):
        s = sample(skill, 9, i)
        modes.add(s.thinking)
        asked = tokenizer.encode_pieces(prompt(s).pieces)
        whole = tokenizer.encode_pieces(conversation(s))
        assert whole[: len(asked)] == asked
        assert whole[len(asked) :] == tokenizer.encode_pieces(completion(s))
        assert whole[-1] == tokenizer.eos_id
    if skill in ("lookup", "sort", "json", "tool_call", "facts", "follow_up"):
        assert modes == {True, False}


@pytest.mark.parametrize("skill", SKILLS)
def test_only_thinking_completions_hold_a_reasoning_mark(skill):
    for i in range(40):
        s = sample(skill, 9, i)
        marks = [p.text for p in completion(s) if p.special and p.text == spellings.THINK_END]
        assert len(marks) == int(s.thinking)
        text = "".join(p.text for p in completion(s))
        assert text.endswith(s.answer + spellings.EOS)


def test_tool_calls_are_written_in_dsml():
    text = "".join(p.text for p in completion(sample("tool_call", 9, 1)))
    assert f"<{spellings.DSML} calls>" in text and f"</{spellings.DSML} invoke>" in text
