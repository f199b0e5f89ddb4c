"""Requests that are longer than the model: refused before anything runs, or cut when asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_jax.errors import RequestError

Ids = tuple[int, ...]


@dataclass
class Fitter:
    """Fits prompts into the model.

    Attributes:
        limit: longest prompt and output together, in tokens.
        bos: token id that stays in front of a prompt that is cut.
        truncate: drop the first tokens of what is too long, instead of refusing it.
        count: prompts that were cut.
    """

    limit: int
    bos: int
    truncate: bool = False
    count: int = 0

    def fit(self, requests: Sequence[tuple[Ids, int]]) -> list[Ids]:
        """The prompts of (prompt, tokens that follow it), each with room for those.

        Raises RequestError, before any is cut, when one is too long and may not be cut, or has
        no room for a single token of its prompt.
        """
        over = [len(prompt) + more - self.limit for prompt, more in requests]
        wrong = [by for by, (_, more) in zip(over, requests, strict=True) if self._never(by, more)]
        if wrong:
            raise RequestError(
                f"{len(wrong)} of {len(requests)} requests are longer than max_model_len "
                f"{self.limit}, the longest by {max(wrong)} tokens.",
                "Nothing was truncated: what is left of a prompt is another question.",
                "Raise max_model_len if the model allows it, lower max_gen_toks, or cut prompts "
                "with truncate=left.",
            )
        self.count += sum(by > 0 for by in over)
        return [self._cut(p, by) for by, (p, _) in zip(over, requests, strict=True)]

    def _never(self, over: int, more: int) -> bool:
        return over > 0 and (not self.truncate or more >= self.limit)

    def _cut(self, prompt: Ids, over: int) -> Ids:
        if over <= 0:
            return prompt
        return (self.bos, *prompt[1 + over :]) if prompt[0] == self.bos else prompt[over:]
