"""One prompt while it is being answered, turn by turn, whoever answers.

Knows the chat template through `data.chat` and the trunks that come of it. Knows no model and no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftloop.core.law import Sampling
from draftloop.data.chat import answer_text, encode_turn
from draftloop.data.prompts import Prompt
from draftloop.data.trunk import Trunk, response_trunk, turn_id
from draftloop.recipe import DataPart


@dataclass
class Dialogue:
    """The answers to one prompt so far.

    Attributes:
        prompt: what is asked.
        sample: which of several answers.
        trunks: one for each turn that was answered.
        refused: why an answer was not taken; empty = none was refused. Nothing is asked after that.
        drawn: how the target draws the answers; None = they came with the prompt.
    """

    prompt: Prompt
    sample: int
    trunks: list[Trunk] = field(default_factory=list)
    refused: str = ""
    drawn: Sampling | None = None
    _said: list[str] = field(default_factory=list)
    _ended: bool = False

    @property
    def name(self) -> str:
        """The id of the turn that is asked next, the key of its draws."""
        return turn_id(self.prompt.id, len(self._said))

    @property
    def open(self) -> bool:
        """Whether a turn is left to ask."""
        return not (self._ended or self.refused) and len(self._said) <= len(self.prompt.turns)

    def ask(self, target: Any, data: DataPart) -> list[int] | None:
        """Token ids to prompt the next turn with; None = all is asked, or the rest has grown too long."""
        if not self.open:
            return None
        ids = encode_turn(target.tokenizer, self.prompt, self._said, template_kwargs=data.template_kwargs)
        self._ended = len(ids) > data.max_prompt_tokens
        return None if self._ended else ids

    def take(self, target: Any, ids: Sequence[int], tokens: Sequence[int], finished: bool) -> None:
        """Keep the answer `tokens` to `ids`."""
        self.trunks.append(response_trunk(ids, tokens, self.name, self.prompt.set, self.sample, finished, self.drawn))
        self._said.append(answer_text(target.tokenizer, tokens, target.eos_ids))
