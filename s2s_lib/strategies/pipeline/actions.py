"""What a schedule is: for each rank, the actions it takes in order.

    F  the forward of one micro-batch through one stage
    B  its backward: the gradient of the stage's input and those of its weights
    I, W  the two halves of a B apart: the gradient of the input, on which the stage before waits,
          and those of the weights, on which nobody waits (Qi et al., arXiv:2401.10241)

A `Schedule` checks that it can be run when it is made (order.py), so a wrong one is refused before
any process starts.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from s2s_lib.strategies.pipeline.order import in_order

KINDS = ("F", "B", "I", "W")
KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}


class Action(NamedTuple):
    """One micro-batch through one stage: kind F, B, I or W. Written `2F0`: stage 2, F, first."""

    stage: int
    kind: str
    micro: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True, repr=False)
class Schedule:
    """`ranks[r]` is the tuple of actions that rank r takes, in order.

    Of every stage and micro-batch there must be one F and either one B, or one I and one W, or (in
    a schedule for inference, then for all) neither. `stages` and `microbatches` count them,
    `rank_of[s]` is the rank of stage s, `walk` what in_order (order.py) gives. With `feedback` n,
    what comes out of the last stage for a micro-batch goes into the first as the n-th after it.

    ValueError names the first action that is there twice, missing, or can never run.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    feedback: int = 0
    stages: int = field(init=False)
    microbatches: int = field(init=False)
    rank_of: tuple[int, ...] = field(init=False)
    walk: tuple = field(init=False, compare=False)

    def __post_init__(self):
        self._set("ranks", tuple(tuple(line) for line in self.ranks))
        rank_of = self._placement()
        self._set("ranks", tuple(tuple(map(Action._make, line)) for line in self.ranks))
        self._set("stages", 1 + max(rank_of))
        self._set("microbatches", 1 + max(a.micro for line in self.ranks for a in line))
        self._check_complete()
        self._set("rank_of", tuple(rank_of[stage] for stage in range(self.stages)))
        self._check_feedback()
        self._set("walk", tuple(in_order(self)))

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    def _placement(self):
        if not self.ranks:
            raise ValueError(f"{self.name}: a schedule needs at least one rank")
        rank_of = {}
        for rank, line in enumerate(self.ranks):
            if not line:
                raise ValueError(f"{self.name}: rank {rank} has nothing to do; use fewer ranks")
            for action in line:
                if not _is_action(action):
                    raise ValueError(
                        f"{self.name}: {_shown(action)} of rank {rank} is no action: "
                        "a stage, F, B, I or W, a micro-batch"
                    )
                stage, kind, micro = action
                if rank_of.setdefault(stage, rank) != rank:
                    raise ValueError(
                        f"{self.name}: {stage}{kind}{micro} is on rank {rank}, but rank "
                        f"{rank_of[stage]} runs stage {stage}"
                    )
        return rank_of

    def _check_complete(self):
        places, line = self.stages * self.microbatches, [a for line in self.ranks for a in line]
        if places > len(line):
            # One of the first places is empty: found without memory for all of them.
            taken = {action.stage * self.microbatches + action.micro for action in line}
            raise ValueError(self._lacks(next(p for p in range(places) if p not in taken), 0))
        # Of every stage and micro-batch, the kinds seen, as bits.
        seen = bytearray(places)
        for line in self.ranks:
            for stage, kind, micro in line:
                place, bit = stage * self.microbatches + micro, _BIT[kind]
                if seen[place] & bit:
                    raise ValueError(f"{self.name}: {stage}{kind}{micro} is there twice")
                seen[place] |= bit
        whole = (_BIT["F"] + _BIT["B"], _BIT["F"] + _BIT["I"] + _BIT["W"])
        if not any(bits > _BIT["F"] for bits in seen):
            whole = (_BIT["F"],)
        for place, bits in enumerate(seen):
            if bits not in whole:
                raise ValueError(self._lacks(place, bits))

    def _lacks(self, place, bits):
        stage, micro = divmod(place, self.microbatches)
        kinds = " and ".join(kind for kind in KINDS if bits & _BIT[kind])
        return (
            f"{self.name}: stage {stage} has {kinds or 'nothing'} of micro-batch {micro}; "
            "it needs F and B, or F, I and W (or, in every place, F alone)"
        )

    def _check_feedback(self):
        count = self.feedback
        if type(count) is not int or count < 0 or (count and self.trains):
            raise ValueError(
                f"{self.name}: feedback={count!r}: a whole number of at least 0, and 0 where there "
                "are backwards"
            )

    @property
    def order(self) -> list[tuple[int, Action]]:
        """(rank, action) for all actions, each after all it needs."""
        return [(rank, action) for rank, action, _, _ in self.walk]

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(action.kind != "F" for action in self.ranks[0])

    @property
    def has_halves(self) -> bool:
        """Whether there are backwards in halves, I and W."""
        return any(action.kind == "I" for line in self.ranks for action in line)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank runs, in the model's order."""
        return [stage for stage in range(self.stages) if self.rank_of[stage] == rank]

    def forward(self) -> "Schedule":
        """The same order with forwards alone."""
        lines = [[action for action in line if action.kind == "F"] for line in self.ranks]
        return Schedule(f"{self.name}, forward", lines, self.feedback)

    @property
    def peak_in_flight(self) -> list[int]:
        """For each rank, the most forwards whose activations it holds at once.

        One counts from its F to the end of its backward: its B, or its W. In inference nothing is
        held beyond its own F, which counts as 1.
        """
        return [max(_in_flight(line)) if self.trains else 1 for line in self.ranks]

    def save(self, path) -> None:
        """Write the picture, an SVG, to a file."""
        from s2s_lib.strategies.pipeline.picture import draw_schedule

        draw_schedule(self).save(path)

    def _repr_html_(self):
        from s2s_lib.strategies.pipeline.picture import draw_schedule

        return draw_schedule(self)._repr_html_()

    def __str__(self):
        lines = [repr(self)]
        plain = self.rank_of == tuple(range(len(self.ranks)))
        for rank, line in enumerate(self.ranks):
            words = (f"{a.kind}{a.micro}" if plain else str(a) for a in line)
            lines.append(f"rank {rank}: " + " ".join(words))
        return "\n".join(lines)

    def __repr__(self):
        stages, microbatches = (
            _count(self.stages, "stage"),
            _count(self.microbatches, "micro-batch"),
        )
        ranks = len(self.ranks)
        on = "" if ranks == self.stages else f" on {_count(ranks, 'rank')}"
        return f"<{self.name}: {stages}{on}, {microbatches}>"


def check_schedule(schedule):
    """ValueError, with what to give, for what is no Schedule: its name, say, or its builder."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"schedule={schedule!r}: give a Schedule, as schedule.gpipe(4, 8) returns one"
        )


def _count(number, what):
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _is_action(action):
    if not isinstance(action, (tuple, list)) or len(action) != 3:
        return False
    stage, kind, micro = action
    numbers = type(stage) is int and type(micro) is int and stage >= 0 and micro >= 0
    return numbers and isinstance(kind, str) and kind in _BIT


def _shown(action):
    triple = isinstance(action, (tuple, list)) and len(action) == 3
    return "".join(map(str, action)) if triple else repr(action)


def _in_flight(line):
    held = 0
    for action in line:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        yield held
