"""What sections of the recipe are made of, and those that say who verifies, how it answers and when a stage ends."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """A section of the recipe: unknown keys are errors, values are checked on assignment.

    Types are strict (`steps: yes` is no number) and numbers finite, unless a field says otherwise.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, strict=True, allow_inf_nan=False)


def no_overflow(temperature: float) -> float:
    """Check a temperature that logits are divided by."""
    if 0 < temperature < 1e-6:
        raise ValueError("temperature must be 0, or at least 1e-6: smaller ones overflow")
    return temperature


class TargetPart(Part):
    """The model that verifies."""

    model: str = Field("smollm2", description="a directory, a hub id, or `smollm2` (the embedded default)")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto = bfloat16")
    device: str = Field("auto", description="auto = cuda where there is a GPU, else cpu")
    tree_attention: Literal["auto", "dense", "flex"] = Field(
        "auto", description="masks of trunks with branches; flex = FlexAttention; auto = flex for long rows on CUDA"
    )
    engine: Literal["auto", "eager", "graph", "fused"] = Field(
        "auto",
        description="how texts are decoded: graph = a CUDA graph a round, auto on CUDA; fused = compiled too; eager",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class ResponsePart(Part):
    """How the target answers the prompts that carry no answer (and all of them with `regenerate`)."""

    regenerate: bool = Field(True, description="let the target answer every prompt, also those that carry an answer")
    max_new_tokens: int = Field(256, ge=2, description="longest answer, in tokens")
    temperature: float = Field(0.0, ge=0, description="0 = greedy; the fast evaluation needs greedy answers")
    top_k: int = Field(0, ge=0, description="draw from the k most likely tokens; 0 = all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set of tokens with this mass; 1 = all")
    samples: int = Field(1, ge=1, description="answers per training prompt; more than one needs a temperature above 0")
    batch_size: int = Field(16, ge=1, description="prompts answered at a time")
    server: str | None = Field(
        None, description="URL of a running OpenAI-compatible server that answers instead; its tokens are checked"
    )
    server_model: str | None = Field(None, description="name of the model on the server; default: the only one there")
    server_concurrency: int = Field(16, ge=1, description="requests under way at a time")
    server_key_env: str | None = Field(
        None, description="environment variable that holds the server's API key; the key itself is never stored"
    )

    @model_validator(mode="after")
    def _check_server(self) -> ResponsePart:
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server {self.server!r} is no URL; write it like http://127.0.0.1:8000/v1")
        if self.server is None and (self.server_model or self.server_key_env):
            raise ValueError("server_model and server_key_env mean nothing without server; name the server's URL")
        return self

    @model_validator(mode="after")
    def _check_filters(self) -> ResponsePart:
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ValueError("top_k and top_p have no effect at temperature 0; raise it, or leave them out")
        return self

    @model_validator(mode="after")
    def _check_samples(self) -> ResponsePart:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("several samples at temperature 0 are one and the same answer; raise the temperature")
        return self


class StopPart(Part):
    """When a stage ends before its last step."""

    patience: int | None = Field(
        None,
        ge=1,
        description="end after so many validation walks in a row without a better tau; the drafter that the stage "
        "begins with is walked first and counts. null = never",
    )
    rise: float = Field(0.0, ge=0, description="how much higher tau must be, in tokens, to count as better")
