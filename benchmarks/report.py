"""A line for each result: what was compared, the ratio, and what it should be."""

import math

lines = []


def geometric_mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def result(what: str, value: float, at_least: float | None = None, at_most: float | None = None):
    """Print and keep one number beside its bound."""
    bounds, verdict = [], ""
    if at_least is not None:
        bounds.append(f"at least {at_least:g}")
        verdict = "" if value >= at_least else "  BELOW"
    if at_most is not None:
        bounds.append(f"at most {at_most:g}")
        verdict = verdict or ("" if value <= at_most else "  ABOVE")
    lines.append(not verdict)
    verdict = verdict or ("  ok" if bounds else "")
    print(f"{what:<68}{value:8.3f}  {', '.join(bounds)}{verdict}", flush=True)
