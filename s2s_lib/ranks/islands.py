"""Islands: groups of ranks that may come late, leave, or die, while the others go on.

Everything that several islands do together is done like this:

    1. they do it, over the connection that the members have;
    2. each says in the *store* whether it went well;
    3. the first to see that all have spoken, or that one has been silent for too long, writes down
       the verdict: did all do it, and which islands are members from now on;
    4. all read that. If not all did it, the islands that are left connect again and repeat it.

What is written down is written once (the store's compare-and-set), so no two islands believe
different things, whoever dies when. What an island has computed counts only after step 4: nothing
is changed before. The store is the one thing that must outlive all islands: here a file in the
folder of the launch, over the internet a server, as torchft and hivemind need one too.
"""

import json
import time
from collections.abc import Iterable
from numbers import Real

import torch.distributed as dist

from s2s_lib.ranks import connection
from s2s_lib.ranks.group import Group, check_group
from s2s_lib.ranks.wire import ConnectionLost, WaitTimeout

LOOK_AGAIN = 0.005
# How long the others take to hear that a connection has ended, and to say so.
TO_HEAR = 0.5


class LeftBehind(RuntimeError):
    """The other islands went on without this one, which was silent for too long."""


class Islands:
    """The ranks of a world in islands of `size` consecutive ranks, of which those in `late` are
    not members at first and `join` later.

    `group` is the ranks at this rank's place in all member islands, `members` the numbers of those.
    An island that says nothing for `patience` seconds (by default the launch's timeout) while
    others wait for it is no member any more: so the most impatient decide, and may be few. With
    fewer than `least` islands none goes on: RuntimeError after `wait` seconds (the launch's
    timeout), which is also how long `join` waits. Give `launch(..., survive=True)`, or the death of
    one rank ends all.

    All ranks make their Islands in the same order, with the same options. ValueError where they
    differ, or the world does not divide into such islands.
    """

    def __init__(
        self,
        world: Group,
        size: int = 1,
        late=(),
        patience: float | None = None,
        least: int = 1,
        wait: float | None = None,
    ):
        check_group(world)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world.size % size:
            sizes = [str(n) for n in range(1, world.size + 1) if world.size % n == 0]
            raise ValueError(
                f"size={size!r}: a world of {world.size} ranks divides into islands of "
                f"{', '.join(sizes)} ranks"
            )
        for name, seconds in (("patience", patience), ("wait", wait)):
            if seconds is not None and (isinstance(seconds, bool) or not is_time(seconds)):
                raise ValueError(f"{name}={seconds!r}: give a number of seconds above 0")
        count = world.size // size
        if not isinstance(late, Iterable) or isinstance(late, str):
            raise ValueError(f"late={late!r}: give a list of islands, of 0..{count - 1}")
        if isinstance(least, bool) or not isinstance(least, int) or not 1 <= least <= count:
            raise ValueError(f"least={least!r}: give a whole number from 1 to {count}")
        if wrong := [number for number in late if number not in range(count)]:
            raise ValueError(f"late={list(late)}: no island {wrong[0]!r}, there are 0..{count - 1}")
        if len(set(late)) == count:
            raise ValueError(f"late={list(late)} are all {count} islands: one must be there first")
        self.world, self.size = world, size
        self.number, self.place = divmod(world.rank, size)
        wire = connection.current()
        self.patience = wire.timeout if patience is None else patience
        self.wait = wire.timeout if wait is None else wait
        self.least = least
        wire.islands += 1
        self.store = wire.store(f"islands-{world.key}-{wire.islands}")
        options = json.dumps([size, sorted(late), self.patience, least, self.wait])
        if (first := self.store.compare_set("options", "", options).decode()) != options:
            raise ValueError(
                f"island {self.number} was made with [size, late, patience, least, wait] = "
                f"{options}, another one with {first}: give all the same"
            )
        self.members = [number for number in range(count) if number not in late]
        self.joined = []
        # How many DiLoCos there are between them.
        self.trained = 0
        # The number of what is done next; all that is said about it carries this number.
        self.attempt = 0
        self.connected = True

    @property
    def here(self) -> bool:
        """Whether this island is a member."""
        return self.number in self.members

    @property
    def group(self) -> Group:
        """The ranks at this place in all member islands."""
        return self.world.subgroup([n * self.size + self.place for n in self.members])

    def ranks_of(self, islands) -> list[int]:
        return [n * self.size + place for n in islands for place in range(self.size)]

    def together(self, work, admit: bool = True):
        """`work(group)` done by all members, or by those that are left; returns its value.

        `work` returns something and changes nothing: it may be called again, with a smaller group.
        Afterwards `joined` lists the islands that are members from now on and were not before:
        they know nothing yet. With `admit=False` none is let in. LeftBehind, if the others did not
        wait for this island.
        """
        if not self.here:
            raise RuntimeError(f"island {self.number} has left the others: join() them first")
        while True:
            self.joined, value, done = [], None, False
            until = time.monotonic() + self.patience
            try:
                self.connect()
                with connection.waiting_at_most(self.patience):
                    value, done = work(self.group), True
            except (ConnectionLost, WaitTimeout):
                # So that the others know at once, and need not wait too.
                connection.hang_up()
                self.connected = False
            now = time.monotonic()
            verdict = self.agree(
                done, admit, now + self.patience if done else max(until, now + TO_HEAR)
            )
            self.follow(verdict)
            if verdict["done"]:
                return value

    def connect(self):
        """Have a connection with the members, and no other."""
        if self.connected:
            return
        if self.store.check([f"{self.attempt} holds"]):
            raise ConnectionLost("the others have gone on without waiting for this island")
        store = dist.PrefixStore(f"connect {self.attempt}", self.store)
        ranks = [self.world.ranks[rank] for rank in self.ranks_of(self.members)]
        try:
            connection.reconnect(store, ranks, self.patience)
        except RuntimeError as error:
            raise ConnectionLost(f"islands {self.members} did not all connect: {error}") from error
        self.connected = True

    def agree(self, done: bool, admit: bool, until: float) -> dict:
        """Say how it went, and wait for the verdict."""
        self.store.set(f"{self.attempt} said {self.world.rank}", "done" if done else "lost")
        key = f"{self.attempt} holds"
        while not self.store.check([key]):
            said, now = self.said(), time.monotonic()
            verdict = self.summary(said, admit)
            if len(said) == len(self.ranks_of(self.members)) or now > until:
                if len(verdict["members"]) >= self.least:
                    self.store.compare_set(key, "", json.dumps(verdict))
                elif now > until + self.wait:
                    raise RuntimeError(
                        f"islands {verdict['members']} are left, and least={self.least} are to go "
                        "on: start again from a checkpoint"
                    )
            time.sleep(LOOK_AGAIN)
        return json.loads(self.store.get(key))

    def said(self) -> dict[int, bool]:
        """Rank -> whether it went well there, for those who have spoken or have left."""
        found = {}
        for rank in self.ranks_of(self.members):
            if self.store.check([f"left {rank // self.size}"]):
                found[rank] = None
            elif self.store.check([f"{self.attempt} said {rank}"]):
                found[rank] = self.store.get(f"{self.attempt} said {rank}") == b"done"
        return found

    def summary(self, said, admit) -> dict:
        left = [
            n
            for n in self.members
            if all(r in said and said[r] is not None for r in self.ranks_of([n]))
        ]
        done = left == self.members and all(said.values())
        asking = [
            n
            for n in range(self.world.size // self.size)
            if n not in self.members
            and all(self.store.check([f"asks {rank}"]) for rank in self.ranks_of([n]))
        ]
        return {"done": done, "members": left, "joined": asking if done and admit else []}

    def follow(self, verdict):
        """Do what holds."""
        before, self.members = self.members, sorted(verdict["members"] + verdict["joined"])
        self.joined = verdict["joined"]
        for rank in self.ranks_of(self.joined):
            self.store.delete_key(f"asks {rank}")
        self.attempt += 1
        if self.members != before or not verdict["done"]:
            self.connected = False
        if not self.here:
            raise LeftBehind(
                f"islands {verdict['members']} did not hear from island {self.number} for so long "
                f"that they went on without it (patience={self.patience:g} s): join() to be let in"
            )

    def join(self):
        """Ask to be let in, and wait until the members have been together the next time; `joined`
        then has this island's number. RuntimeError after `wait` seconds in which they have not.
        """
        if self.here:
            raise ValueError(f"island {self.number} is a member already")
        self.store.set(f"asks {self.world.rank}", "")
        until = time.monotonic() + self.wait
        while self.number not in self.members:
            if self.store.check([key := f"{self.attempt} holds"]):
                verdict = json.loads(self.store.get(key))
                self.joined = verdict["joined"]
                self.members = sorted(verdict["members"] + self.joined)
                self.attempt += 1
            elif time.monotonic() > until:
                self.store.delete_key(f"asks {self.world.rank}")
                raise RuntimeError(
                    f"no island has let island {self.number} in: are there any left?"
                )
            else:
                time.sleep(LOOK_AGAIN)
        # Until now it was what told the others that this island had left.
        self.store.delete_key(f"left {self.number}")
        self.connected = False

    def leave(self):
        """Go: the others need not wait. `join` comes back.

        To be called on all ranks of the island, between two steps: its own connections end too, so
        until it has joined again it has only what each rank can do alone.
        """
        self.store.set(f"left {self.number}", "")
        connection.hang_up()
        self.members = [n for n in self.members if n != self.number]
        self.connected = False


def is_time(seconds) -> bool:
    return isinstance(seconds, Real) and 0 < seconds < float("inf")
