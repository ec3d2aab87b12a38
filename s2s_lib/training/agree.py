"""What one rank finds out, all know before any of them goes on."""

import json

from s2s_lib.ranks.group import Group
from s2s_lib.strategies.replicas import exchange

# Of so many things of one kind that do not fit, the rest are only counted.
MOST_TOLD = 5


def told(world: Group, work, kind: type[Exception], words: str) -> list:
    """What `work()` returns on each rank, as JSON has it, on all.

    Where it raises on some rank, all raise `kind`, in these words and those of the first of them.
    """
    error = None
    try:
        mine = json.dumps({"value": work()})
    except Exception as raised:
        error = raised
        said = str(raised) if isinstance(raised, kind) else f"{type(raised).__name__}: {raised}"
        mine = json.dumps({"error": f"rank {world.rank}: {said}"})
    everyone = [json.loads(said) for said in exchange(mine.encode(), world)]
    failed = [said["error"] for said in everyone if "error" in said]
    if failed:
        raise kind(f"{words}: {failed[0]}") from error
    return [said["value"] for said in everyone]


def refuse_misfits(everyone: list[dict], there: set[str], words: str):
    """ValueError, on all ranks alike, for what some rank found wrong and what none holds."""
    wrong = [complaint for rank in everyone for complaint in rank["wrong"]]
    held = {name for rank in everyone for name in rank["held"]}
    kinds = [wrong, [f"{name} is unexpected" for name in sorted(there - held)]]
    if any(kinds):
        told = "; ".join(first_ones(complaints) for complaints in kinds if complaints)
        raise ValueError(
            f"{words}, it does not fit this model: {told}. Build the model, in the precision, that "
            "was saved"
        )


def first_ones(complaints: list[str]) -> str:
    complaints = list(dict.fromkeys(complaints))
    more = len(complaints) - MOST_TOLD
    return "; ".join(complaints[:MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
