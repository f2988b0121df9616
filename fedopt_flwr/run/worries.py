"""What a person should know of a run that is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..rounds.record import NOT_COUNTED, RoundRecord
from .result import Result

_NAMED = 5  # failing clients that are named


def worries_of(result: Result) -> Iterator[str]:
    """Say that a run diverged or ended without replies; else which clients failed in at least half
    of the rounds in which they were asked."""
    diverged_at = result.summary["diverged_at"]
    counted = Counter(i for r in result.rounds if r.round for i in r.clients)
    if diverged_at is not None:
        yield (
            f"{result.summary['algorithm']}: diverged in round {diverged_at}: losses were no "
            "longer finite, 20 times the first, or again those of an untrained model; lower the "
            "learning rates, set training.clip_norm, or look for values in the data that are not "
            f"finite{_why_taken_back(result.rounds[-1])}"
        )
    elif result.idle_from is not None:
        text = "in any round, so the model is the untrained one"
        if counted:
            last = max(record.round for record in result.rounds if record.clients)
            text = f"from round {result.idle_from} on, so the model is that of round {last}"
        yield f"no client's reply was counted {text}; the last error: {result.last_error}"
    else:
        errors = [e for r in result.rounds if r.round for e in r.errors if e["phase"] == "train"]
        errors = [error for error in errors if not str(error["error"]).startswith(NOT_COUNTED)]
        failed = Counter(error["client"] for error in errors)
        last_error = {error["client"]: error["error"] for error in errors}
        failing = [i for i in failed if 1 < failed[i] >= counted[i]]
        for i in failing[:_NAMED]:
            yield (
                f"client {i}: failed in {failed[i]} of the {failed[i] + counted[i]} rounds in "
                "which it was asked, so the model knows little of its data; the last error: "
                f"{last_error[i]}"
            )
        if more := len(failing[_NAMED:]):
            yield f"{more} more clients failed in at least half of their rounds; see rounds.jsonl"


def _why_taken_back(last: RoundRecord) -> str:
    if not last.taken_back:
        return ""
    named = [e for e in last.errors if not str(e["error"]).startswith(NOT_COUNTED)]
    text = "; ".join(f"client {e['client']}: {e['error']}" for e in named)
    return (
        f"; round {last.round} was taken back ({text}); where that is one client's doing, set "
        "federation.max_reply_norm"
    )
