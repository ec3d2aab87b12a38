"""The hardware in one description: GPUs, nodes, and the two kinds of link between ranks.

The same `Cluster` slows the real ranks of a lesson (`launch(..., cluster=...)`) and feeds a
planner, so what an emulation shows and what a formula says can be compared.

The model of a network is deliberately small. **Each rank has its own full-duplex port to each
class of link**: one "intra" port to the ranks of its node and one "inter" port to all others. A
rank may send and receive at full speed at once, its messages queue behind one another on a port,
and ranks never share one. Where the ranks of a node do share a network card, give each its share
(one 100 Gbit/s card for four ranks that all send: `gbit_s=25`), or the whole of it if only one of
them ever crosses. A message of n bytes arrives `latency + 8 n / rate` after its port was free.

Real fabrics also have contention in the switches, routes of several hops and protocol overhead:
collectives on good hardware reach about 80-90 % of the figures that vendors print (ml-engineering,
below). The presets keep the printed figures.

Units: Gbit/s is 1e9 bits a second and GB 1e9 bytes, so 100GbE moves 12.5 GB/s each way.
"""

import difflib
import math
from dataclasses import dataclass, field, replace
from numbers import Integral, Real


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, repr=False)
class Link:
    """One direction of a rank's port: `gbit_s` in 1e9 bits a second, `latency_us` one way.

    Raises ValueError unless the rate is a finite number above 0 and the latency one of at least 0.
    """

    gbit_s: float
    latency_us: float = 0.0
    name: str = ""
    source: str = ""

    def __post_init__(self):
        if not (_is_number(self.gbit_s) and 0 < self.gbit_s < math.inf):
            raise ValueError(
                f"gbit_s={self.gbit_s!r}: a link needs a rate above 0, as a number of Gbit/s "
                "(100GbE is 100); for a link that slows nothing give None instead of a Link"
            )
        if not (_is_number(self.latency_us) and 0 <= self.latency_us < math.inf):
            raise ValueError(
                f"latency_us={self.latency_us!r}: a latency is a number of microseconds, "
                "0 or more (25 ms is 25000)"
            )

    @property
    def bytes_per_second(self) -> float:
        return self.gbit_s * 1e9 / 8

    def seconds(self, nbytes: int) -> float:
        """Time from a free port to arrival: latency + 8 nbytes / rate."""
        return self.latency_us * 1e-6 + nbytes / self.bytes_per_second

    def __repr__(self):
        speed = f"{self.gbit_s:g} Gbit/s, {self.latency_us:g} us"
        return f"{self.name} ({speed})" if self.name else f"({speed})"


@dataclass(frozen=True)
class GPU:
    """What one rank computes on: memory in the vendor's GB, peak dense bf16 in 1e12 flop/s.

    GB is taken as 1e9 bytes. Drivers report up to 7 % more, which about pays for what they and
    the allocator keep for themselves.
    """

    name: str
    memory_gb: float
    bf16_tflops: float
    source: str = field(default="", repr=False)

    def __post_init__(self):
        for key in ("memory_gb", "bf16_tflops"):
            value = getattr(self, key)
            if not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{key}={value!r} of GPU {self.name!r}: give a number above 0")

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1e9)

    @property
    def flops_per_second(self) -> float:
        return self.bf16_tflops * 1e12


@dataclass(frozen=True, repr=False)
class Cluster:
    """`nodes` times `gpus_per_node` ranks, numbered node by node, one GPU each.

    `intra` and `inter` are each rank's ports to its own node and to the others (see the module's
    docstring); None means that such messages are not slowed. Counts that are not whole numbers of
    at least 1 and links that are not a `Link` raise ValueError.
    """

    nodes: int
    gpus_per_node: int
    gpu: GPU | None = None
    intra: Link | None = None
    inter: Link | None = None

    def __post_init__(self):
        for key in ("nodes", "gpus_per_node"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key}={value!r}: give a whole number of at least 1")
        for key, kind in (("gpu", GPU), ("intra", Link), ("inter", Link)):
            value = getattr(self, key)
            if not isinstance(value, (kind, type(None))):
                hint = f"{kind.__name__}(gbit_s=...)" if kind is Link else "GPU(name, ...)"
                raise ValueError(f"{key}={value!r} is no {kind.__name__}: write {key}={hint}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.gpus_per_node

    def node(self, rank: int) -> int:
        """The node that a world rank lives on: rank // gpus_per_node."""
        if not isinstance(rank, Integral) or not 0 <= rank < self.size:
            raise ValueError(
                f"rank {rank} is not in this cluster of {self.size} ranks ({self.nodes} nodes x "
                f"{self.gpus_per_node}): ranks go from 0 to {self.size - 1}"
            )
        return rank // self.gpus_per_node

    def link_class(self, a: int, b: int) -> str:
        """ "intra" for two ranks of one node, else "inter"; a rank has no link to itself."""
        if a == b:
            raise ValueError(f"rank {a} has no link to itself; ask about two different ranks")
        return "intra" if self.node(a) == self.node(b) else "inter"

    def link(self, a: int, b: int) -> Link | None:
        """The link from rank a to rank b, the same both ways; None if it is not slowed."""
        return self.intra if self.link_class(a, b) == "intra" else self.inter

    def __repr__(self):
        parts = [f"{self.nodes} x {self.gpus_per_node}" + (f" {self.gpu.name}" if self.gpu else "")]
        if self.gpus_per_node > 1:
            parts.append(f"intra {self.intra or 'not slowed'}")
        if self.nodes > 1:
            parts.append(f"inter {self.inter or 'not slowed'}")
        return f"<Cluster {'; '.join(parts)}>"


# Sources of the numbers below.
_STAS = "github.com/stas00/ml-engineering @744d01e"
# One step of a large-message ring in the cost model that NCCL itself chooses algorithms by.
_NCCL = "latency: github.com/NVIDIA/nccl @01afd20, src/graph/tuning.cc, ring, Simple protocol"
_TCP = (
    "rate: the standard; latency: half of the 110 us that a small TCP message and its answer took "
    "between two Linux hosts on 1 Gbit/s cards (serverfault.com/questions/791539); RDMA and tuned "
    "kernels are several times faster"
)

RTX_4090 = GPU("RTX 4090", 24, 165.2, "NVIDIA Ada whitepaper (bf16 with fp32 accumulate)")
RTX_A6000 = GPU("RTX A6000", 48, 154.8, "NVIDIA GA102 whitepaper, table 3")
A100 = GPU("A100 SXM 80GB", 80, 312, f"{_STAS}, compute/accelerator")
H100 = GPU("H100 SXM", 80, 989, f"{_STAS}, compute/accelerator")

PCIE_4 = Link(31 * 8, 5.7, "PCIe 4 x16", f"31 GB/s each way: {_STAS}, network; {_NCCL}")
NVLINK_3 = Link(300 * 8, 3.4, "NVLink 3", f"300 GB/s each way: {_STAS}, network; {_NCCL}")
NVLINK_4 = Link(450 * 8, 3.4, "NVLink 4", f"450 GB/s each way: {_STAS}, network; {_NCCL}")
HDR = Link(200, 9.6, "InfiniBand HDR", f"25 GB/s a port: {_STAS}, network; {_NCCL}")
NDR = Link(400, 9.6, "InfiniBand NDR", f"50 GB/s a port: {_STAS}, network; {_NCCL}")
ETHERNET_100 = Link(100, 55, "100GbE", _TCP)
ETHERNET_10 = Link(10, 55, "10GbE", _TCP)
INTERNET = Link(
    1,
    40_000,
    "internet",
    "rate: the slow link of Streaming DiLoCo, arXiv:2501.18512, table 1; latency: half of the "
    "82 ms from France to New York and back (gist.github.com/bragonznx/2f56d141f19890a28ce0)",
)

PRESETS: dict[str, Cluster] = {
    # One box; with more nodes, 10GbE between them. GeForce cards have no NVLink and copy through
    # host memory, so expect less than this PCIe link.
    "4x4090": Cluster(1, 4, RTX_4090, intra=PCIE_4, inter=ETHERNET_10),
    # NVLink bridges join pairs only: a ring of four still crosses PCIe, which bounds it.
    "4xa6000": Cluster(1, 4, RTX_A6000, intra=PCIE_4, inter=ETHERNET_10),
    # Eight network cards a node, one for each GPU (A100: arXiv:2104.04473, section 5).
    "dgx-a100": Cluster(2, 8, A100, intra=NVLINK_3, inter=HDR),
    "dgx-h100": Cluster(2, 8, H100, intra=NVLINK_4, inter=NDR),
    # One card for each GPU; divide the rate where the GPUs of a node share it.
    "100gbe": Cluster(2, 4, A100, intra=NVLINK_3, inter=ETHERNET_100),
    "10gbe": Cluster(4, 1, RTX_4090, intra=PCIE_4, inter=ETHERNET_10),
    # Each island has one line, so it stands as one rank: the one that talks to the others.
    "islands": Cluster(4, 1, H100, intra=NVLINK_4, inter=INTERNET),
}


def preset(name: str, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
    """A known cluster by name, with other counts if given; `PRESETS` lists them.

    Each link and GPU says where its numbers come from in `.source`. Unknown names raise
    ValueError with the nearest one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name).lower(), PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no preset {name!r}: {hint}There are {', '.join(PRESETS)}")
    counts = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    return replace(PRESETS[name], **{k: v for k, v in counts.items() if v is not None})
