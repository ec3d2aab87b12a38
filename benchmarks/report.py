"""A line for each result: what was compared, the ratio, and what it should be."""

import math

lines = []


def geometric_mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def result(what: str, value: float, at_least: float | None = None, at_most: float | None = None):
    """Print and keep one number beside its bound."""
    bound, good = "", True
    if at_least is not None:
        bound, good = f"at least {at_least:g}", value >= at_least
    if at_most is not None:
        bound, good = f"at most {at_most:g}", value <= at_most
    verdict = "" if not bound else "  ok" if good else "  BELOW" if at_least else "  ABOVE"
    lines.append(good)
    print(f"{what:<68}{value:8.3f}  {bound}{verdict}", flush=True)
