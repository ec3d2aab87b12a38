"""Every layout of 4 and of 8 ranks beside one process: `python tools/parity.py [--ranks 4 8]`.

All (dp, tp, pp), times ZeRO stage and hybrid shard, sequence parallel, schedule, and a tied head:
three AdamW steps with clipping, in float64 to 1e-9, as tests/parallel_training.py compares them. A
line for each layout: ok, the words with which the configuration refuses it, or FAILED and what
differs. The exit code is 1 if one failed, or was refused that should not be, or the other way
round. About a quarter of an hour on two cores.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from parallel_training import alone, assert_same, cannot_be, matrix, refusal, trained_at

from s2s_lib import launch

# Layouts in one launch: starting ranks takes longer than training.
TOGETHER = 8


def said_of(layouts):
    """(layout, "ok" or what is wrong) of some layouts of as many ranks."""
    try:
        results = launch(trained_at, layouts, ranks=layouts[0].ranks, timeout=120)
    except Exception as error:
        if len(layouts) > 1:
            for layout in layouts:
                yield from said_of([layout])
        else:
            yield layouts[0], f"FAILED {error}"
        return
    for layout, *of_ranks in zip(layouts, *results, strict=True):
        try:
            assert_same(layout, of_ranks, alone(layout.layers, layout.tied))
            yield layout, "ok"
        except AssertionError as error:
            yield layout, f"FAILED {error}"


def refused(layout):
    """What the configuration says, and FAILED if it should not have, or should have."""
    words = refusal(layout)
    if (words is not None) == cannot_be(layout):
        # Without the name of the file.
        return words and "refused: " + "; ".join(w.split(": ", 1)[1] for w in words.splitlines())
    return f"FAILED refused, and can be: {words}" if words else "FAILED not refused"


def every(ranks):
    layouts = matrix(ranks, tied=[False, True])
    words = {layout: refused(layout) for layout in layouts}
    yield from ((layout, said) for layout, said in words.items() if said)
    possible = [layout for layout in layouts if words[layout] is None]
    for start in range(0, len(possible), TOGETHER):
        yield from said_of(possible[start : start + TOGETHER])


def main(ranks):
    began, count = time.monotonic(), Counter()
    for number in ranks:
        for layout, said in every(number):
            count[said.partition(" ")[0].strip(":")] += 1
            print(f"{time.monotonic() - began:6.0f} s  {layout!s:<60}  {said}", flush=True)
    print(f"{count['ok']} as one process, {count['refused']} refused, {count['FAILED']} failed")
    return 1 if count["FAILED"] or not count["ok"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    sys.exit(main(parser.parse_args().ranks))
