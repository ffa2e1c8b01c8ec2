"""What the tests of the offline evaluation share: a tally as numbers, and versions that are wrong in one part."""

from __future__ import annotations

import numpy as np

from draftloop.evaluate import offline as room


def numbers(tally):
    return [tally.steps, tally.tau, *tally.survivors, *tally.refusals]


def law_cut(keep, left):
    """The last token of the text never comes as a draft."""
    law = GAINS(keep, left)
    return law if len(law) < left else GAINS(np.where(np.arange(len(keep)) == left - 2, 0.0, keep), left)


GAINS, SURVIVAL = room.gains, room.survival
BROKEN = {
    "p and q swapped": ("survival", lambda log_p, log_q: SURVIVAL(log_q, log_p)),
    "no minimum": ("survival", lambda log_p, log_q: (log_q - log_p).exp().clamp(max=1.5)),
    "acceptance of the draft, not of the text": ("survival", lambda log_p, log_q: (log_p + 0 * log_q).exp()),
    "a correction token too few": ("gains", lambda keep, left: GAINS(np.append(keep[:-1], 0.0), left)),
    "one off at the end": ("gains", lambda keep, left: law_cut(keep, left)),
    "the text seems longer": ("gains", lambda keep, left: GAINS(keep, left + 1)[:left]),
}
