"""The special tokens' spellings; ids are always looked up in the tokenizer by spelling."""

from typing import Final

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
PAD: Final = "<｜▁pad▁｜>"
SYSTEM: Final = "<｜System｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
THINK: Final = "<think>"
THINK_END: Final = "</think>"
DSML: Final = "｜DSML｜"
REMINDER: Final = "<｜latest_reminder｜>"
IMAGE: Final = "<｜deepseek_image｜>"

TASKS: Final = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Quick-instruction task name -> its token."""

RENDERED: Final = (
    BOS,
    EOS,
    PAD,
    SYSTEM,
    USER,
    ASSISTANT,
    THINK,
    THINK_END,
    DSML,
    REMINDER,
    *TASKS.values(),
    IMAGE,
)
"""Every spelling that prompts use; a tokenizer without one of them is refused."""
