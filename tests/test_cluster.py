"""The hardware model: units, who shares a node, and what is refused.

A link that took Gbit for GB, or a preset with 25 GB/s for 100GbE, fails the unit tests; ranks
numbered across nodes instead of node by node fail the link classes.
"""

import math
import pickle
import subprocess
import sys

import pytest

from s2s_lib.cluster import (
    ETHERNET_100,
    GPU,
    PRESETS,
    Cluster,
    Link,
    preset,
)

FAST, SLOW = Link(100, 2, "fast"), Link(1, 50, "slow")
TWO_BY_THREE = Cluster(nodes=2, gpus_per_node=3, intra=FAST, inter=SLOW)


def test_100_gigabit_ethernet_moves_12_5_gigabytes_a_second():
    assert ETHERNET_100.bytes_per_second == 12.5e9
    assert Link(100).seconds(12_500_000_000) == pytest.approx(1.0)


def test_a_message_takes_latency_plus_bytes_over_rate():
    link = Link(gbit_s=1, latency_us=50)
    assert link.seconds(0) == pytest.approx(50e-6)
    assert link.seconds(1_000_000) == pytest.approx(50e-6 + 8e-3)


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, "100", None, True])
def test_a_link_refuses_a_rate_that_is_no_number_above_zero(rate):
    with pytest.raises(ValueError, match="gbit_s=.*rate above 0") as error:
        Link(rate)
    assert repr(rate) in str(error.value)


@pytest.mark.parametrize("latency", [-1, math.nan, math.inf, "5", None])
def test_a_link_refuses_a_negative_or_odd_latency(latency):
    with pytest.raises(ValueError, match="latency_us=.*0 or more") as error:
        Link(1, latency)
    assert repr(latency) in str(error.value)


def test_ranks_are_numbered_node_by_node():
    assert TWO_BY_THREE.size == 6
    assert [TWO_BY_THREE.node(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_link_classes_follow_the_nodes_and_are_the_same_both_ways():
    pairs = {(a, b) for a in range(6) for b in range(6) if a != b}
    inside = {(a, b) for a, b in pairs if TWO_BY_THREE.link_class(a, b) == "intra"}
    assert inside == {(a, b) for a, b in pairs if (a < 3) == (b < 3)}
    assert all(TWO_BY_THREE.link(a, b) is (FAST if (a, b) in inside else SLOW) for a, b in pairs)


def test_a_class_without_a_link_is_not_slowed():
    cluster = Cluster(nodes=2, gpus_per_node=2, inter=SLOW)
    assert cluster.link(0, 1) is None
    assert cluster.link(1, 2) is SLOW


def test_a_rank_has_no_link_to_itself():
    with pytest.raises(ValueError, match="rank 4 has no link to itself"):
        TWO_BY_THREE.link(4, 4)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_the_cluster_is_refused_with_the_numbers(rank):
    with pytest.raises(ValueError, match=f"rank {rank} .* 6 ranks .2 nodes x 3.*0 to 5"):
        TWO_BY_THREE.node(rank)
    with pytest.raises(ValueError, match=f"rank {rank}"):
        TWO_BY_THREE.link_class(0, rank)


@pytest.mark.parametrize("counts", [(0, 4), (2, -1), (1.5, 2), ("2", 2), (2, True)])
def test_counts_of_nodes_and_gpus_are_whole_and_at_least_one(counts):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        Cluster(*counts)


def test_a_bare_number_for_a_link_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"inter=100 is no Link: write inter=Link\(gbit_s"):
        Cluster(2, 2, inter=100)
    with pytest.raises(ValueError, match="gpu='A100' is no GPU"):
        Cluster(2, 2, gpu="A100")


def test_a_gpu_speaks_in_bytes_and_flops_and_refuses_nonsense():
    gpu = GPU("toy", memory_gb=24, bf16_tflops=165.2)
    assert gpu.memory_bytes == 24 * 10**9
    assert gpu.flops_per_second == 165.2e12
    with pytest.raises(ValueError, match="memory_gb=-1 of GPU 'toy'"):
        GPU("toy", -1, 100)


def test_every_preset_tells_where_its_numbers_come_from():
    for cluster in PRESETS.values():
        assert cluster.gpu.source
        assert all(link.source for link in (cluster.intra, cluster.inter))
        assert cluster.inter.gbit_s <= cluster.intra.gbit_s


def test_presets_have_the_published_sizes_and_rates():
    """Vendors' figures: GB of memory, dense bf16 Tflop/s, GB/s each way inside and between."""
    published = {
        "4x4090": (24, 165.2, 31, 1.25),
        "4xa6000": (48, 154.8, 31, 1.25),
        "dgx-a100": (80, 312, 300, 25),
        "dgx-h100": (80, 989, 450, 50),
        "100gbe": (80, 312, 300, 12.5),
        "10gbe": (24, 165.2, 31, 1.25),
        "islands": (80, 989, 450, 0.125),
    }
    assert set(published) == set(PRESETS)
    for name, (memory, flops, inside, between) in published.items():
        cluster = PRESETS[name]
        assert (cluster.gpu.memory_gb, cluster.gpu.bf16_tflops) == (memory, flops)
        assert cluster.intra.bytes_per_second == inside * 1e9
        assert cluster.inter.bytes_per_second == between * 1e9
    assert 0.01 <= PRESETS["islands"].inter.seconds(0) <= 0.1


def test_a_preset_can_be_cut_to_the_ranks_at_hand():
    cluster = preset("dgx-h100", nodes=2, gpus_per_node=2)
    assert cluster.size == 4
    assert cluster.inter is PRESETS["dgx-h100"].inter
    assert preset("dgx-h100") == PRESETS["dgx-h100"]
    with pytest.raises(ValueError, match="nodes=0"):
        preset("dgx-h100", nodes=0)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'dgx-h100'"):
        preset("DGX_H100")
    with pytest.raises(ValueError, match="There are 4x4090, "):
        preset("zzz")


def test_a_cluster_prints_on_one_line_and_survives_pickling():
    text = repr(TWO_BY_THREE)
    assert text == "<Cluster 2 x 3; intra fast (100 Gbit/s, 2 us); inter slow (1 Gbit/s, 50 us)>"
    assert repr(Cluster(2, 1)) == "<Cluster 2 x 1; inter not slowed>"
    assert pickle.loads(pickle.dumps(TWO_BY_THREE)) == TWO_BY_THREE


def test_describing_hardware_does_not_load_torch():
    code = "import sys, s2s_lib.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
