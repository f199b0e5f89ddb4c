"""Text in and out: tokenizer, chat prompts, output parsing and the Engram's compressed ids."""
