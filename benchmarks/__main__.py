"""`python -m benchmarks [PART ...]`, all parts without one; PARTS below names them."""

import sys

from benchmarks import (
    collectives,
    islands,
    links,
    mesh,
    pipeline,
    report,
    starts,
    steps,
    tensor,
    zero,
)

PARTS = {
    "starts": starts,
    "collectives": collectives,
    "steps": steps,
    "links": links,
    "zero": zero,
    "pipeline": pipeline,
    "tensor": tensor,
    "mesh": mesh,
    "islands": islands,
}


def main(names):
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}: choose from {', '.join(PARTS)}")
    for name in names or PARTS:
        print(f"\n== {name}: {PARTS[name].__doc__.splitlines()[0]}")
        PARTS[name].main()
    print(f"\n{sum(report.lines)} of {len(report.lines)} within their bounds")
    return 0 if all(report.lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
