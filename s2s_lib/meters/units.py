"""How a number of bytes is written for people: 980 B, 19.6 MB, 1.2 GB (powers of 1000)."""


def human_bytes(count: float) -> str:
    """`count` bytes in the largest unit that keeps it at 1 or more, with three digits."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
