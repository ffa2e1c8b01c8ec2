"""Cells of a stage that have no effect beside the others. Knows names alone.

They are said, not refused: an ablation changes one cell of a stage, and what goes with that cell may stay as it was.
"""

from __future__ import annotations

from typing import Any

_DRAFT_OPD = ("gamma", "accepted", "rejected", "reduction", "correction", "first_rejected_only")


def idle_cells(stage: Any) -> list[str]:
    """Sentences on the cells of a stage that were given and have no effect.

    Only a value that differs from the default counts as given: the resolved recipe of a run spells every default out.

    Args:
        stage: a `StagePart`.
    """
    kind, sources, said = stage.objective.kind, set(stage.mixture), []

    def look(part: str, keys: tuple[str, ...], why: str) -> None:
        section = getattr(stage, part)
        fields = type(section).model_fields
        idle = [f"{part}.{key}" for key in keys if getattr(section, key) != fields[key].get_default()]
        if idle:
            said.append(f"Stage {stage.name}: {', '.join(idle)} ha{'ve' if idle[1:] else 's'} no effect {why}.")

    if kind != "draft_opd":
        look("objective", _DRAFT_OPD, f"on kind {kind}")
    if kind != "e2e_tv":
        look("objective", ("estimator",), f"on kind {kind}")
    if kind not in ("tv", "nla", "e2e_tv"):
        look("objective", ("ce_weight",), f"on kind {kind}")
    if stage.trunks != "rollout":
        look("rollout", tuple(type(stage.rollout).model_fields), "without trunks: rollout")
    if "sampled" not in sources:
        look("branch", ("greedy_share",), "without proposals: sampled")
    if not {"sampled", "redraft"} & sources:
        look("branch", ("target_tokens",), "without proposals: sampled or redraft")
    if stage.optimiser.schedule != "wsd":
        look("optimiser", ("decay_share",), f"on schedule {stage.optimiser.schedule}")
    if stage.optimiser.schedule == "constant":
        look("optimiser", ("final",), "on schedule constant")
    if stage.stop.patience is None:
        look("stop", ("rise",), "without patience")
    return said
