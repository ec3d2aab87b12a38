"""DiLoCo: data parallelism over links that are too slow for it.

    who holds what    every island all of its model, plus outer weights and momentum: two copies
    who sends what    2(W-1)/W of the weights' bytes once in H steps, where DDP sends them in each

Each of W islands trains by itself for H steps. Then the islands average how far each has come, and
take that average for the gradient of one step of an *outer* optimizer, from which all go on:

    gradient = outer - live                                # the pseudo-gradient
    gradient = all_reduce(gradient, islands, "avg")
    momentum = outer_momentum * momentum + gradient
    outer    = outer - outer_lr * (gradient + outer_momentum * momentum)
    live     = outer

An island is a rank, or as many as a model needs: DiLoCo works on whatever this rank has of it, so
inside an island there may be DDP, ZeRO, tensor and pipeline parallelism, and `group` is the ranks
at the same place in all islands: one more axis of a mesh.

Local SGD is the same with an outer step of 1 without momentum (Stich, arXiv:1805.09767); that with
H = 1 at first is post-local SGD (Lin et al., arXiv:1808.07217). (Douillard et al.,
arXiv:2311.08105; streaming: arXiv:2501.18512.)
"""

import contextlib

import torch
from torch import nn

from s2s_lib.collectives.background import background
from s2s_lib.collectives.functions import all_reduce, broadcast
from s2s_lib.collectives.quantised import quantised_all_reduce
from s2s_lib.ranks.group import Group
from s2s_lib.ranks.islands import Islands, LeftBehind
from s2s_lib.strategies.diloco.beside import Buffers, check_moments, moments_of
from s2s_lib.strategies.diloco.checks import (
    check_optimizer,
    check_options,
    claim_optimizer,
    refuse_complex,
    release,
    sync_interval,
)
from s2s_lib.strategies.diloco.fragment import Fragment, OuterStep, Underway, cut
from s2s_lib.strategies.diloco.gossip import meet
from s2s_lib.strategies.diloco.newcomers import let_in, refuse_others
from s2s_lib.strategies.diloco.state import kept_in
from s2s_lib.strategies.grads import refuse_cut_over
from s2s_lib.strategies.replicas import check_options_same, check_same, refuse_averaged_over

# On which background thread: gradients and weights travel on others.
BETWEEN_ISLANDS = 4
# Each rank sends the same, 2(W-1)/W of the bytes, and the link is crossed twice, however many
# islands there are: between islands latency counts most.
ALGORITHM = "direct"


class Fixed:
    """Islands of which none comes or goes."""

    here, joined = True, ()

    def __init__(self, group: Group):
        self.group, self.number = group, group.rank

    def together(self, work, admit=True):
        return work(self.group)


class DiLoCo:
    """Watches the steps of `inner_optimizer`; after each `sync_every`-th all islands are synced.

    The loop stays as it is: `loss.backward(); optimizer.step()`. All islands make equally many
    steps. At the end call `flush()`, which syncs what is left where steps are no multiple of
    `sync_every`; `with DiLoCo(...):` does so, and lets go of the optimizer.

        diloco = DiLoCo(model, optimizer, mesh["island"], sync_every=50)

    `model` is a module, a DDP, a ZeRO or a Parallel, `group` the ranks at the same place in all
    islands; or an `Islands`, of which some may come late, leave or die. Construction: all check
    that they built the same, and take the weights and buffers of the first island; a latecomer
    waits for the next sync, and takes what the others have then, the momentum too.

    RuntimeError where the optimizer has a DiLoCo already: `close()` that one first.
    FloatingPointError on all, and nothing is changed, where an island has diverged.

    What is synced: each parameter that requires a gradient, used or not, by an outer step
    (`outer_lr`, `outer_momentum`, `nesterov`, as in torch.optim.SGD); buffers of floating numbers
    become their mean; frozen parameters and other buffers are not touched. The inner optimizer's
    moments stay what they are on each island: with `moments="average"` they are averaged too, with
    "reset" forgotten.

    Streaming: with `fragments=P` the parameters are synced in P parts, each once in `sync_every`
    steps, one after the other, so that less travels at a time. With `delay` they travel behind that
    many inner steps; then the live weights become the outer ones, but for the share `mixing` that
    they keep of themselves (the paper: 0.5).
    `bits` 8 or 4: pseudo-gradients travel as whole numbers (quantised_all_reduce), with
    `error_feedback` such that what rounding has left out is sent the next time.
    `gossip`: each island takes an outer step by itself and then the mean of its outer weights and
    those of one other island, drawn from `seed` anew in each round: the islands are never all the
    same until `flush()`, and each keeps a momentum of its own.

    Sent by each rank in `sync_every` steps: 2(W-1)/W of the bytes of its parameters, in at least
    float32, where W does not divide them some ranks an element more; three times as much with
    averaged moments of Adam; with `bits` a quarter or an eighth, and scales; with `gossip` the
    bytes once. In `flush()` as much again, if there were steps since. Floating buffers add
    2(W-1)/W of theirs once a round.
    Held: two copies of this rank's parameters, a third with `error_feedback`, and one of buffers;
    while a fragment is under way its pseudo-gradients and averages, and in the outer step about
    four more of that fragment.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        group: Group | Islands,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        *,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        bits: int | None = None,
        error_feedback: bool = False,
        moments: str = "keep",
        gossip: bool = False,
        seed: int = 0,
    ):
        options = {
            "sync_every": sync_every, "outer_lr": outer_lr, "outer_momentum": outer_momentum,
            "nesterov": nesterov, "fragments": fragments, "delay": delay, "mixing": mixing,
            "bits": bits, "error_feedback": error_feedback, "moments": moments, "gossip": gossip,
            "seed": seed,
        }  # fmt: skip
        check_options(model, group, options)
        named = check_optimizer(model, inner_optimizer)
        refuse_complex(named, bits)
        self.islands = group if isinstance(group, Islands) else Fixed(group)
        self.model, self.optimizer = model, inner_optimizer
        self.how = OuterStep(outer_lr, outer_momentum, nesterov)
        self.delay, self.mixing, self.bits, self.moments = delay, mixing, bits, moments
        self.gossip, self.seed = gossip, seed
        if isinstance(group, Islands):
            refuse_others(model, options, group)
        self.names = [name for name, _ in named]
        self.fragments = [Fragment(part, error_feedback) for part in cut(named, fragments)]
        self.buffers = Buffers(model)
        newcomer = not self.islands.here or self.islands.number in self.islands.joined
        if not newcomer:
            refuse_cut_over(named, self.group)
            refuse_averaged_over(named, self.group)
            if isinstance(group, Group):
                check_same(model, group)
                check_options_same(options, group, "DiLoCo")
            self.begin_alike()
        self._sync_every = sync_every
        # Inner steps in this round, and rounds, which end with a sync of the last fragment.
        self.steps = self.rounds = 0
        # Whether islands have met in pairs since all were the same.
        self.apart = False
        self.watching = group
        claim_optimizer(inner_optimizer, group)
        self.hook = inner_optimizer.register_step_post_hook(self.after_step)
        if newcomer:
            self.come_in()

    @property
    def group(self) -> Group:
        """The ranks at this place in all islands."""
        return self.islands.group

    @property
    def sync_every(self) -> int:
        return self._sync_every

    @sync_every.setter
    def sync_every(self, steps: int):
        """For a change between two rounds, on all islands alike: RuntimeError within one."""
        sync_interval(steps, len(self.fragments), self.delay)
        if self.steps:
            raise RuntimeError(
                f"sync_every can change between rounds, and {self.steps} steps of one of "
                f"{self._sync_every} are done: flush() first"
            )
        self._sync_every = steps

    @torch.no_grad()
    def begin_alike(self):
        """All take the first island's weights and buffers. In place: a ZeRO notices that."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        tensors = [*frozen, *self.model.buffers(), *(row.outer for row in self.rows)]

        def work(group):
            return [broadcast(tensor.detach(), group) for tensor in tensors]

        for tensor, value in zip(tensors, self.islands.together(work, False), strict=True):
            tensor.copy_(value)
        for row in self.rows:
            row.hand_out()
        self.buffers = Buffers(self.model)

    # Inner steps go by

    def after_step(self, *_):
        """After each step of the inner optimizer: sync what is due."""
        self.check_trainable()
        step = self.steps + 1
        self.steps = step % self.sync_every
        for fragment in self.fragments:
            fragment.since += 1
        try:
            self.sync_due(step)
            let_in(self, self.islands)
        except LeftBehind:
            self.come_in()

    def check_trainable(self):
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        if names != self.names:
            changed = set(names) ^ set(self.names)
            other = next(name for name in [*names, *self.names] if name in changed)
            raise RuntimeError(
                f"{other} was frozen, or not, when DiLoCo was built, and that has changed: close() "
                "it, and build another"
            )

    def sync_due(self, step):
        ends = step == self.sync_every
        try:
            self.sync_fragments(step)
        finally:
            self.rounds += ends

    def sync_fragments(self, step):
        for number, fragment in enumerate(self.fragments):
            if step == self.due(number):
                self.begin(fragment)
            if fragment.underway and fragment.since >= self.delay:
                self.finish(fragment, self.mixing)

    def come_in(self):
        """Take part from now on, with what the other islands have."""
        while True:
            if not self.islands.here:
                self.islands.join()
            with contextlib.suppress(LeftBehind):
                let_in(self, self.islands)
                return

    def due(self, number) -> int:
        """After which step of a round a fragment is to be synced: the last after all of them."""
        return self.sync_every // len(self.fragments) * (number + 1)

    def flush(self):
        """Sync all that has moved since it was synced: then all islands are the same.

        Collective; to be called on all islands after the same number of steps. A new round begins.
        """
        for fragment in self.fragments:
            if fragment.underway:
                self.finish(fragment, self.mixing, admit=False)
        for fragment in self.fragments:
            if fragment.since:
                self.begin(fragment)
                self.finish(fragment, admit=False)
        if self.apart:
            self.meet_all()
        self.rounds, self.steps = self.rounds + bool(self.steps), 0

    # A sync, in two halves, between which inner steps may go by

    def begin(self, fragment: Fragment):
        """Send this island's pseudo-gradients."""
        mine = [row.pseudo_gradient() for row in fragment.rows]
        task = None
        if self.delay:
            task = background(self.average, fragment.rows, mine, self.group, lane=BETWEEN_ISLANDS)
        fragment.underway, fragment.since = Underway(mine, fragment.since, task), 0

    def average(self, rows, mine, group) -> list[tuple]:
        """The average of each pseudo-gradient, and what of it is left to send the next time.
        Nothing is changed."""
        if self.gossip:
            return [(gradient, None) for gradient in mine]
        if self.bits is None:
            return [(all_reduce(gradient, group, "avg", ALGORITHM), None) for gradient in mine]
        found = []
        for row, gradient in zip(rows, mine, strict=True):
            left = None if row.residual is None else row.residual.clone()
            average = quantised_all_reduce(gradient, group, "avg", self.bits, left)
            found.append((average, left))
        return found

    def finish(self, fragment: Fragment, mixing: float = 0.0, admit: bool = True):
        """When the average is there: the outer step, and what follows for the live weights.

        Where it fails on all islands nothing has changed, and the next sync sends it all.
        """
        underway, fragment.underway = fragment.underway, None
        try:
            outcome = self.islands.together(lambda g: self.agreed(fragment, underway, g), admit)
        except BaseException:
            fragment.since += underway.steps
            raise
        stepped, residuals, moments, moved = outcome
        for row, (outer, momentum), residual in zip(fragment.rows, stepped, residuals, strict=True):
            row.outer, row.momentum, row.residual = outer, momentum, residual
            row.hand_out(mixing)
        self.apart = self.gossip
        # Unless they kept a share of their own, the live weights are the outer ones, with nothing
        # to tell.
        fragment.since = max(1, fragment.since) if mixing else 0
        for name, tensor in self.moments_of(fragment).items():
            tensor.copy_(moments[name])
        if fragment is self.fragments[-1]:
            self.buffers.hand_out(moved)
        if self.moments == "reset":
            for parameter in fragment.parameters:
                self.optimizer.state.pop(parameter, None)

    def agreed(self, fragment, underway, group):
        """What is to become of a fragment, and of what is averaged beside it; changes nothing."""
        mine, _, task = underway
        averages = task.wait() if task else self.average(fragment.rows, mine, group)
        if not all(average.isfinite().all() for average, _ in averages):
            raise FloatingPointError(
                f"the pseudo-gradient of an island is not finite after its {underway.steps} steps: "
                "nothing was changed; go on from a checkpoint, with a smaller learning rate"
            )
        both = zip(fragment.rows, averages, strict=True)
        stepped = [row.step(average, self.how) for row, (average, _) in both]
        if self.gossip:
            outers, momenta = zip(*stepped, strict=True) if stepped else ((), ())
            stepped = list(zip(meet(outers, group, self.seed, self.rounds), momenta, strict=True))
        moments = self.moments_of(fragment)
        if self.moments == "average":
            check_moments(moments, group)
        moments = {name: all_reduce(m, group, "avg", ALGORITHM) for name, m in moments.items()}
        moved = self.buffers.moved() if fragment is self.fragments[-1] else []
        moved = [all_reduce(far, group, "avg", ALGORITHM) for far in moved]
        return stepped, [residual for _, residual in averages], moments, moved

    def moments_of(self, fragment) -> dict:
        return moments_of(self.optimizer, fragment) if self.moments == "average" else {}

    def meet_all(self):
        """After rounds of gossip: the mean over all islands."""
        rows = self.rows
        means = self.islands.together(
            lambda g: [all_reduce(row.outer, g, "avg", ALGORITHM) for row in rows], admit=False
        )
        for row, mean in zip(rows, means, strict=True):
            row.outer = mean
            row.hand_out()
        self.apart = False

    @property
    def rows(self):
        return [row for fragment in self.fragments for row in fragment.rows]

    # The surface

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way."""
        return not any(fragment.underway for fragment in self.fragments)

    @property
    def counts(self) -> list[int]:
        """Rounds, inner steps in this one, whether islands are apart, and inner steps since each
        fragment was last synced: with what is in the optimizer's state, all that going on needs."""
        since = (fragment.since for fragment in self.fragments)
        return [self.rounds, self.steps, int(self.apart), *since]

    @counts.setter
    def counts(self, counts):
        self.rounds, self.steps, apart, *since = counts
        self.apart = bool(apart)
        for fragment, steps in zip(self.fragments, since, strict=True):
            fragment.since = steps

    def held(self) -> dict[str, list[torch.Tensor]]:
        """For the memory meter: `memory(model, optimizer, diloco)`."""
        kept = [(row.outer, row.momentum, row.residual) for row in self.rows]
        return {"optimizer": [t for tensors in kept for t in tensors if t is not None]}

    @contextlib.contextmanager
    def in_state(self):
        """Inside, the inner optimizer's state also has what belongs to the outer step, for each
        parameter: "outer" and "outer_momentum", and with feedback "outer_residual", of its shape.
        To be saved with it, or loaded; loaded without, the outer weights are the live ones.

        Save `counts` too. RuntimeError unless `at_rest`. (`load_state_dict` of torch's optimizers
        rounds what it loads to the parameter's dtype: with 16-bit parameters the outer weights.)
        """
        if not self.at_rest:
            raise RuntimeError("a fragment is under way: save when the DiLoCo is at_rest")
        with kept_in(self.optimizer, self.rows):
            yield

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self):
        """Let go of the optimizer; nothing is synced."""
        if self.hook is not None:
            self.hook.remove()
            release(self.optimizer, self.watching)
            self.hook = None
