"""A unit: parameters that are gathered, used, reduced and freed together."""

from torch import nn

from s2s_lib.strategies.flat import Flat


class Unit:
    """A module and those of its parameters that no unit inside it has, in their flat buffers.

    `coming` is the gather of its weights under way on a second thread, or None; `watched` whether
    the last forward will tell when its backward is over; `reduced` whether its gradients have been
    sent in this backward.
    """

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.named = []
        self.flats, self.trainable, self.due = [], [], []
        self.coming = None
        self.is_open = self.stashed = self.reduced = self.watched = False
        # Forwards to be differentiated since the last backward ended.
        self.uses = 0

    @property
    def parameters(self):
        return [parameter for _, parameter in self.named]

    def cut(self, group, param_dtype, stage):
        """Make the flats: one for each dtype, frozen parameters apart."""
        kinds = {}
        for name, parameter in self.named:
            key = parameter.dtype, parameter.requires_grad
            kinds.setdefault(key, []).append((name, parameter))
        for named in kinds.values():
            names, parameters = zip(*named, strict=True)
            self.flats.append(
                Flat(
                    names, parameters, group, param_dtype, keep_full=stage < 3, keep_local=stage < 2
                )
            )
        self.trainable = [flat for flat in self.flats if flat.trainable]

    # Weights

    @property
    def stale(self):
        return any(flat.stale for flat in self.flats)

    def prepare(self):
        """Memory for the flats that are not up to date: what `gather` fills."""
        self.due = [flat for flat in self.flats if flat.stale]
        for flat in self.due:
            flat.prepare()

    def gather(self):
        for flat in self.due:
            flat.gather()

    def arrive(self):
        if self.coming is not None:
            coming, self.coming = self.coming, None
            coming.wait()

    def use(self):
        self.arrive()
        for flat in self.flats:
            flat.use()
        self.is_open = True

    def rest(self):
        if self.is_open or self.coming is not None:
            self.arrive()
            for flat in self.flats:
                flat.rest()
            self.is_open = False

    def keep(self):
        for flat in self.flats:
            flat.keep()

    # Gradients

    @property
    def complete(self):
        """Whether all gradients of this backward are known to be there.

        In mixed precision autograd forgets a parameter's gradient node when its dtype changes, so
        each use brings a gradient of its own: then only the end of backward knows.
        """
        if self.uses > 1 and any(flat.mixed for flat in self.trainable):
            return False
        return all(all(flat.arrived) for flat in self.trainable)

    @property
    def arrived(self):
        return any(any(flat.arrived) for flat in self.trainable)

    @property
    def has_local(self):
        return any(any(flat.has) for flat in self.trainable)

    def begin(self):
        """A backward begins."""
        self.reduced = False
        for flat in self.trainable:
            flat.arrived = [False] * len(flat.parameters)

    def stash(self):
        if not self.stashed:
            self.stashed = True
            for flat in self.trainable:
                flat.stash()

    def reduce(self, averaged_over):
        for flat in self.trainable:
            flat.reduce(averaged_over)

    def drop_local(self):
        for flat in self.trainable:
            flat.drop_local()

    def hand_out(self):
        for flat in self.trainable:
            if flat.reduced is not None:
                flat.hand_out()
            elif self.stashed:
                flat.put_back()
        self.stashed = False
        self.uses = 0

    def forget(self):
        for flat in self.trainable:
            flat.put_back()
            flat.reduced = None
            flat.forget()
        self.stashed = False


def make_units(module: nn.Module, chosen=None) -> list[Unit]:
    """The units of a module, in its order, the root last; each parameter is in one of them."""
    names = {id(m): name for name, m in module.named_modules()}
    picked = [m for m in choose(module, chosen) if m is not module]
    for inner in picked:
        if id(inner) not in names:
            raise ValueError(f"units names a {type(inner).__name__} that is no part of the module")
    units = {
        id(m): Unit(names[id(m)], m) for m in sorted(picked, key=lambda m: list(names).index(id(m)))
    }
    root = Unit("the root", module)
    holders = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, parameter in inner.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            holders.setdefault(id(parameter), (full, parameter, []))[2].append(path)
    paths = {unit.name: unit for unit in units.values()}
    for name, parameter, places in holders.values():
        around = [set(enclosing(place, paths)) for place in places]
        common = set.intersection(*around)
        unit = paths[max(common, key=len)] if common else root
        unit.named.append((name, parameter))
    return [unit for unit in units.values() if unit.named] + [root]


def enclosing(path, paths):
    """The units around the module at this path."""
    parts = path.split(".")
    return [p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in paths]


def choose(module, chosen):
    if chosen is None:
        return repeated_blocks(module)
    if isinstance(chosen, str):
        raise TypeError(f"units is a class of modules or a list of modules, got {chosen!r}")
    if isinstance(chosen, type):
        found = [m for m in module.modules() if isinstance(m, chosen)]
        if not found:
            raise ValueError(f"units={chosen.__name__}: the module contains none")
        return found
    chosen = list(chosen)
    if not all(isinstance(m, nn.Module) for m in chosen):
        raise TypeError(f"units is a class of modules or a list of modules, got {chosen!r}")
    return chosen


def repeated_blocks(module):
    """The members of every outermost list of two or more modules of one class."""
    members = list(module.children())
    alike = len(members) > 1 and len({type(member) for member in members}) == 1
    # Lists of lists are not run themselves, what is in them is.
    runs = alike and not isinstance(members[0], (nn.ModuleList, nn.ModuleDict))
    if runs and isinstance(module, (nn.ModuleList, nn.Sequential)) and has_parameters(members[0]):
        return members
    return [block for member in members for block in repeated_blocks(member)]


def has_parameters(module):
    return any(True for _ in module.parameters())
