"""Answers from a running OpenAI-compatible server, taken only where their tokens are certain.

Prompts go out as the token ids that we made, and answers come back as token ids where the server tells them. Where it
tells only text, that text is tokenised behind its prompt, and must decode to itself and have as many tokens as the
server counted. What cannot be confirmed is refused, never guessed. Knows no drafter and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftloop.core.draws import Purpose, bits, key_of
from draftloop.core.errors import InputError
from draftloop.data.template import token_ids
from draftloop.recipe import DataPart, ResponsePart
from draftloop.supervise.dialogue import Dialogue
from draftloop.target.server import Server, side_by_side

_TRIED = 8  # tokens of the first answer that are compared with our own target's
_TIE = 0.06  # of the largest logit: what bfloat16 and other kernels may move a logit by

Job = tuple[Dialogue, list[int]]


@dataclass(frozen=True)
class Answer:
    """One confirmed answer, or the reason why there is none.

    Attributes:
        tokens: the answer's ids, end-of-sequence included where there was one.
        finished: ended by end-of-sequence.
        refused: why it cannot be taken; empty = it can.
    """

    tokens: tuple[int, ...] = ()
    finished: bool = False
    refused: str = ""


def answer_by_server(
    target: Any, work: Sequence[Dialogue], data: DataPart, answers: ResponsePart, seed: int, done: Callable[..., None]
) -> None:
    """Have a server answer all turns of the dialogues.

    Args:
        target: our copy of what the server serves.
        work: unanswered; they fill up.
        data: template arguments and limits.
        answers: the server, sampling, length.
        seed: of the recipe; each request has a seed of its own, drawn from it.
        done: called with each dialogue as it ends, in any order.

    Raises:
        InputError: the server serves another model, changes prompts, or refuses them.
        EnvironmentFault: it cannot be reached or went away; what was `done` is done.
    """
    assert answers.server is not None
    fix = "Start it again and run the same command: the answers that are finished were kept."
    server = Server(answers.server, key_env=answers.server_key_env, fix=fix)
    try:
        source = ServerSource(server, target, answers, seed)
        jobs: list[Job] = []
        for dialogue in work:
            ids = dialogue.ask(target, data)
            if ids is None:
                done(dialogue)
            else:
                jobs.append((dialogue, ids))
        if jobs:
            source.check_model(jobs[0][1])

        def follow(job: Job, reply: dict[str, Any]) -> Job | None:
            dialogue, ids = job
            answer = source.read(ids, reply)
            if answer.refused:
                dialogue.refused = answer.refused
            else:
                dialogue.take(target, ids, answer.tokens, answer.finished)
            following = dialogue.ask(target, data)
            if following is None:
                done(dialogue)
                return None
            return dialogue, following

        side_by_side(jobs, source.ask, follow, concurrency=answers.server_concurrency, check=server.models)
    finally:
        server.close()


class ServerSource:
    """A server that answers token ids with token ids.

    Raises:
        InputError: it does not serve the model that is named.
    """

    def __init__(self, server: Server, target: Any, answers: ResponsePart, seed: int) -> None:
        self.server, self.target, self.answers, self.seed = server, target, answers, seed
        self.model = str(server.pick_model(answers.server_model)["id"])

    def body(self, ids: Sequence[int], key: int, sample: int) -> dict[str, Any]:
        """The request. Every sampling option is said, for servers take what is unsaid from the model's own defaults."""
        mixed = bits(self.seed, Purpose.TARGET, key, sample)
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": self.answers.max_new_tokens,
            "temperature": self.answers.temperature,
            "top_p": self.answers.top_p,
            "top_k": self.answers.top_k or -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": int(mixed) & 0x7FFFFFFF,
            "stop_token_ids": list(self.target.eos_ids),
            "ignore_eos": False,
            "return_token_ids": True,
            # for servers that tell no token ids: the text must then hold every token, the last one too
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "no_stop_trim": True,
        }

    def ask(self, job: Job) -> dict[str, Any]:
        """Send one turn; the server's reply."""
        dialogue, ids = job
        return self.server.complete(self.body(ids, key_of(dialogue.name), dialogue.sample))

    def read(self, ids: Sequence[int], reply: dict[str, Any]) -> Answer:
        """Confirm the tokens of a reply.

        Args:
            ids: the prompt that was sent.
            reply: what came back.

        Raises:
            InputError: this is no completion, or the server changed the prompt.
        """
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            text, reason, told = str(choice["text"]), choice["finish_reason"], choice.get("token_ids")
        except (KeyError, IndexError, TypeError) as error:
            fix = "Use a server with an OpenAI-compatible /completions."
            raise InputError("the server's reply is no completion", where=self.server.url, fix=fix) from error
        self._check_prompt(ids, choice.get("prompt_token_ids"), usage.get("prompt_tokens"))
        if reason not in ("stop", "length"):
            return Answer(refused=f"the server ended it for the reason {reason!r}")
        count = usage.get("completion_tokens")
        if told is not None:
            tokens = [int(token) for token in told]
        else:
            found = self._tokens_of(ids, text)
            if found is None or count is None:
                why = "its text is not what its tokens decode to" if found is None else "the server counted no tokens"
                return Answer(refused=why)
            tokens = found
        ends = self.target.eos_ids
        if reason == "stop" and (not tokens or tokens[-1] not in ends):
            named = choice.get("stop_reason", choice.get("matched_stop"))
            if named not in ends and len(ends) != 1:
                return Answer(refused="the server does not say which end-of-sequence token it ended with")
            tokens.append(named if named in ends else ends[0])
        if count is not None and len(tokens) != count:
            return Answer(refused=f"it has {len(tokens)} tokens by our tokenizer and {count} by the server's count")
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.target.vocab_size:
            return Answer(refused="it is empty or holds a token that the target does not have")
        if any(token in ends for token in tokens[:-1]):
            return Answer(refused="it goes on after an end-of-sequence token")
        return Answer(tuple(tokens), tokens[-1] in ends)

    def check_model(self, ids: Sequence[int]) -> None:
        """Compare the first tokens of one greedy answer with our target, near-ties allowed.

        Raises:
            InputError: the server's tokens are not our target's.
        """
        body = {**self.body(ids, 0, 0), "max_tokens": _TRIED, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
        answer = self.read(ids, self.server.complete(body))
        fix = f"Serve {self.target.name}, or name the model that is served as the target."
        if answer.refused:
            raise InputError(f"the server's tokens cannot be confirmed ({answer.refused})", where=self.server.url)
        text = torch.tensor([[*ids, *answer.tokens]], device=self.target.device)
        with torch.no_grad():
            place = torch.arange(text.shape[1], device=text.device).unsqueeze(0)
            hidden = self.target.extend(self.target.new_cache(text.shape[1]), text, place).hidden[0]
            logits = self.target.readout.logits(hidden[len(ids) - 1 : -1])
        best = logits.max(-1).values
        gap = best - logits.gather(-1, text[0, len(ids) :].unsqueeze(-1)).squeeze(-1)
        wrong = (gap > _TIE * logits.abs().max(-1).values).nonzero().flatten().tolist()
        if wrong:
            raise InputError(
                f"the server's model is not our target: token {wrong[0] + 1} of its greedy answer lies "
                f"{gap[wrong[0]]:.2g} below our largest logit",
                where=self.server.url,
                fix=fix,
            )

    def _check_prompt(self, ids: Sequence[int], told: Sequence[int] | None, count: int | None) -> None:
        if (told is not None and list(told) != list(ids)) or (count is not None and count != len(ids)):
            raise InputError(
                f"the server answered another prompt than the {len(ids)} tokens that it was sent",
                where=self.server.url,
                fix="Use a server that takes token ids as they are (vLLM, SGLang), with the target's own tokenizer.",
            )

    def _tokens_of(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Token ids of a text behind its prompt; None where they do not decode to it."""
        tokenizer = self.target.tokenizer
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        both = token_ids(tokenizer, tokenizer.decode(list(ids), **options) + text)
        rest = both[len(ids) :]
        kept = both[: len(ids)] == list(ids) and tokenizer.decode(rest, **options) == text
        return rest if kept else None
