"""Pipeline schedules: who computes what in which order, as plain values.

A model cut into S stages runs on the ranks of a pipeline, and a batch, cut into M micro-batches,
runs through the stages one after the other. A builder here gives a `Schedule` (actions.py), and
that one value is printed, drawn (picture.py), simulated (simulate.py) and run (run.py).

A rank runs one stage, or several: then they are laid round the ranks (stage s on rank s % P), or,
in the two V schedules, to the last rank and back (rank r has stages r and 2P-1-r).

    builder                      sources
    naive                        one micro-batch at a time
    gpipe                        Huang et al., arXiv:1811.06965
    one_f_one_b                  PipeDream-Flush, arXiv:2006.09503; Megatron-LM, arXiv:2104.04473
    interleaved                  Megatron-LM, section 2.2
    looped_bfs                   Lamy-Poirier, arXiv:2211.05953
    zb_h1, zb_h2                 Zero Bubble, arXiv:2401.10241
    zbv                          Zero Bubble, section 6
    dualpipev                    github.com/deepseek-ai/DualPipe: that of DeepSeek-V3
                                 (arXiv:2412.19437) cut in half
    forward_only, streaming      inference
"""

from collections.abc import Iterable

from s2s_lib.strategies.pipeline.actions import Action, Schedule


def naive(stages: int, microbatches: int = 1) -> Schedule:
    """One micro-batch after the other, each forward and backward alone: one rank works at a time.

    Bubble (P-1)/P whatever M; in flight 1.
    """
    return _one_stage_a_rank("naive", stages, microbatches, lambda rank: [(microbatches, "F B")])


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Bubble (P-1)/(M+P-1); in flight M on every rank."""
    return _one_stage_a_rank(
        "GPipe", stages, microbatches, lambda rank: [(microbatches, "F"), (microbatches, "B")]
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """A warm-up of P-1-s forwards, then a forward and a backward in turn.

    Bubble as GPipe's, (P-1)/(M+P-1); in flight min(M, P-s) on stage s.
    """
    return _one_stage_a_rank(
        "1F1B",
        stages,
        microbatches,
        lambda rank: [(stages - 1 - rank, "F"), (microbatches, "F B")],
    )


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with W put off by as many micro-batches as the stage's number: the last stages fill
    with W the time in which the first still wait.

    For M >= P and W no longer than F or I a rank idles (P-1)(F+I-W), a third of 1F1B's where all
    three are equal; in flight up to P on every rank.
    """
    return _one_stage_a_rank(
        "ZB-H1",
        stages,
        microbatches,
        lambda rank: [(stages - 1 - rank, "F"), (rank, "F I"), (microbatches, "F I W")],
    )


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Twice ZB-H1's warm-up, W put off by twice as many: ranks start and end at different times.

    For M >= 2P-1 the rank that takes longest idles max(0, (P-1)(F+I-2W)) between its own first and
    last action: nothing where F = I = W. Where ranks begin each batch together, as here, the ramps
    at both ends remain. In flight up to 2P-1 on every rank.
    """
    return _one_stage_a_rank(
        "ZB-H2",
        stages,
        microbatches,
        lambda rank: [(2 * (stages - 1 - rank), "F"), (2 * rank, "F I"), (microbatches, "F I W")],
    )


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Inference: forwards alone. Bubble (P-1)/(M+P-1)."""
    return _one_stage_a_rank(
        "forward only", stages, microbatches, lambda rank: [(microbatches, "F")]
    )


def streaming(stages: int, requests: int, tokens: int) -> Schedule:
    """Token generation for several requests at once: micro-batch t * requests + r is the t-th new
    token of request r, which needs the one before it.

    With R >= P requests every rank is busy between ramps: R T + P - 1 forwards' time for R T
    tokens, where one process needs R T P; with fewer, each token waits for its own way round.
    """
    _check_counts(stages=stages, requests=requests, tokens=tokens)
    line = [(requests * tokens, "F")]
    ranks = [_phased([rank], requests * tokens, line) for rank in range(stages)]
    return Schedule("streaming", ranks, feedback=requests)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages a rank, laid round: micro-batches take turns in rounds of about P.

    Where M is a multiple of P the bubble is (P-1)/(vM+P-1) for v chunks; (vP-1)/(P-1) times the
    messages; in flight up to (v-1)P + 2(P-1-r) + 1 stages, each 1/v of a rank's, on rank r. With
    R = max(1, M // P) rounds, M must be a multiple of R; else ValueError with the nearest M.
    """
    _check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if microbatches % _rounds(ranks, microbatches):
        raise ValueError(
            f"interleaved on {ranks} ranks takes {microbatches} micro-batches in "
            f"{_rounds(ranks, microbatches)} rounds, which do not share them out equally; "
            f"the nearest numbers that work are {_nearest_rounds(ranks, microbatches)}"
        )
    rounds = _rounds(ranks, microbatches)
    size = microbatches // rounds
    lines = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        turns = [(stage, size) for stage in stages] * rounds
        back = [(stage, size) for stage in reversed(stages)] * rounds
        warm_up = (chunks - 1) * size + 2 * (ranks - 1 - rank)
        lines.append(_weave([*_take("F", turns)], [*_take("B", back)], warm_up))
    return Schedule(f"interleaved 1F1B x{chunks}", lines)


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through a rank's first stage, then through its next, and back the same
    way, the last micro-batch first: GPipe's memory with the bubble of `interleaved`, where M >= P.
    """
    _check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    lines = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in range(microbatches)]
        lines.append(forwards + [Action(s, "B", m) for s, _, m in reversed(forwards)])
    return Schedule(f"looped breadth-first x{chunks}", lines)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank in a V: the rank of the first stage also has the last, so a micro-batch
    comes home and its backward starts there. Between its first and last action no rank idles where
    F = I = W and M >= 2P-1; in flight 2P stages, each half of a rank's: the memory of 1F1B.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    full = max(microbatches, 2 * ranks - 1)

    def phases(rank):
        return [
            (2 * (ranks - rank) - 1, "F0"),
            (rank, "F1 F0"),
            (ranks - rank, "F1 I1 W1"),
            (full - (2 * ranks - 1) + rank, "F0 I0 W0 F1 I1 W1"),
            (ranks - 1 - rank, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (ranks - rank, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]

    return _in_a_v("ZBV", ranks, microbatches, phases)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """ZBV's placement with whole backwards in the middle, each paired with a forward of the other
    stage, so that a machine that can overlaps the two (run here one after the other).

    In flight up to 2P+1 stages, each half of a rank's. Needs M >= 2P; else ValueError.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ValueError(
            f"DualPipeV on {ranks} ranks has {2 * ranks} stages and needs at least as many "
            f"micro-batches, got {microbatches}; the nearest number that works is {2 * ranks}"
        )

    def phases(rank):
        after = ranks - 1 - rank
        # The last backwards are split, from the middle of the stretch in which no forward is left.
        mixed = ["B1 B0"] * (rank + 1)
        half = (rank + 1) // 2
        mixed[half:] = ["I1 I0"] * (rank + 1 - half)
        if rank % 2 == 0:
            mixed[half] = "B1 I0"
        return [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "I1 W F1"),
            (microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
            (after, "B1 F1 B0"),
            *((1, words) for words in mixed),
            (after, "W I0"),
            (rank + 1, "W"),
        ]

    return _in_a_v("DualPipeV", ranks, microbatches, phases)


BUILDERS = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "forward_only": forward_only,
}


def _check_counts(**counts):
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}: give a whole number of at least 1")


def _one_stage_a_rank(name, stages, microbatches, phases) -> Schedule:
    _check_counts(stages=stages, microbatches=microbatches)
    lines = [_phased([rank], microbatches, phases(rank)) for rank in range(stages)]
    return Schedule(name, lines)


def _in_a_v(name, ranks, microbatches, phases) -> Schedule:
    stages = [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    lines = [_phased(stages[rank], microbatches, phases(rank)) for rank in range(ranks)]
    return Schedule(name, lines)


def _phased(stages, microbatches, phases: Iterable[tuple[int, str]]) -> list[Action]:
    """A rank's actions from phases: how often, and which words.

    A word is a kind and which of the rank's stages, the first if it does not say: "F1" is the next
    forward of its second. A "W" without a number is the oldest that is owed. What would be of a
    micro-batch that does not exist is left out, so a phase may ask for more than there is.
    """
    line, count, owed = [], {}, []
    for times, words in phases:
        pairs = [(word[0], int(word[1:]) if word[1:] else None) for word in words.split()]
        for _ in range(times):
            for kind, which in pairs:
                stage = stages[which or 0]
                if kind == "W":
                    of = [pair for pair in owed if which is None or pair[0] == stage]
                    owed.remove(of[0])
                    stage, micro = of[0]
                else:
                    key = stage, kind == "F"
                    micro = count[key] = count.get(key, -1) + 1
                    if kind == "I":
                        owed.append((stage, micro))
                if micro < microbatches:
                    line.append(Action(stage, kind, micro))
    return line


def _take(kind, turns):
    """The actions of one kind in turns of (stage, how many micro-batches)."""
    count = {}
    for stage, size in turns:
        start = count.get(stage, 0)
        count[stage] = start + size
        yield from (Action(stage, kind, micro) for micro in range(start, start + size))


def _weave(forwards, backwards, warm_up):
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards left over."""
    warm_up = min(warm_up, len(forwards))
    line = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        line += [forward, backward]
    return line + backwards[len(forwards) - warm_up :]


def _rounds(ranks, microbatches):
    return max(1, microbatches // ranks)


def _nearest_rounds(ranks, microbatches):
    fits = [m for m in range(1, microbatches + ranks + 1) if m % _rounds(ranks, m) == 0]
    below = max(m for m in fits if m < microbatches)
    return f"{below} and {min(m for m in fits if m > microbatches)}"
