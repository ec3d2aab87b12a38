"""The bill counts every byte once; the timeline says where the time went.

Times are compared with each other or with sleeps, with wide margins. A message counted on the
receiver too would double the bill; a wait counted as communication too would make the parts of a
timeline longer than the whole.
"""

import json
import time

import pytest
import torch

from s2s_lib import (
    Cluster,
    Link,
    Timelines,
    all_reduce,
    background,
    barrier,
    bill,
    broadcast,
    launch,
    recv,
    send,
    timeline,
)


def test_the_bill_counts_bytes_and_messages_by_collective_group_and_link():
    def work(world):
        pair = world.subgroup([0, 2]) or world.subgroup([1, 3])
        with bill() as account:
            all_reduce(torch.ones(1000), world, algorithm="ring")
            all_reduce(torch.ones(100), pair, algorithm="direct")
            with bill() as inner:
                broadcast(torch.ones(10), world, root=1, algorithm="naive")
        all_reduce(torch.ones(5000), world)
        return account, inner

    cluster = Cluster(nodes=2, gpus_per_node=2)
    for rank, (account, inner) in enumerate(launch(work, ranks=4, cluster=cluster)):
        sent_as_root = 3 * 40 if rank == 1 else 0
        assert account.by("collective") == {"all_reduce": 6000 + 400} | (
            {"broadcast": 120} if rank == 1 else {}
        )
        assert account.bytes == 6400 + sent_as_root == sum(account.by("link").values())
        assert account.messages == 6 + 2 + (3 if rank == 1 else 0)
        assert inner.bytes == sent_as_root
        pair = (0, 2) if rank % 2 == 0 else (1, 3)
        assert account.by("group") == {(0, 1, 2, 3): 6000 + sent_as_root, pair: 400}
        # In the ring ranks 1 and 3 send over the border of the nodes; every pair spans it.
        across = (6000 if rank in (1, 3) else 0) + 400 + (80 if rank == 1 else 0)
        assert account.by("link")["inter"] == across
        assert f"rank {rank} sent {account.bytes:,} bytes" in repr(account)


def test_a_bill_refuses_to_split_by_what_it_does_not_know():
    def work(world):
        with bill() as account:
            pass
        return account

    with pytest.raises(ValueError, match="collective, group, link"):
        launch(work, ranks=1)[0].by("colour")


def test_what_the_optional_check_sends_is_not_on_the_bill():
    def work(world):
        with bill() as account, timeline() as line:
            all_reduce(torch.ones(1000), world, algorithm="ring")
        return account.bytes, account.messages, len(line.waits)

    assert launch(work, ranks=2, check=True) == launch(work, ranks=2) == [(4000, 2, 4)] * 2


def test_a_bill_sees_what_a_background_thread_sends():
    def work(world):
        with bill() as account:
            task = background(all_reduce, torch.ones(1000), world, algorithm="ring")
            task.wait()
        return account.bytes

    assert launch(work, ranks=2) == [4000, 4000]


def test_headers_of_emulated_links_are_not_on_the_bill():
    def work(world):
        with bill() as account:
            if world.rank == 0:
                send(torch.ones(8), 1, world)
            else:
                recv(torch.empty(8), 0, world)
        return account.bytes, account.messages

    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(gbit_s=10, latency_us=10))
    assert launch(work, ranks=2, cluster=cluster) == [(32, 1), (0, 0)]


def late_sender(world):
    barrier(world)
    with timeline() as line:
        if world.rank == 0:
            with line.section("thinking"):
                time.sleep(0.2)
            send(torch.ones(3), 1, world)
        else:
            recv(torch.empty(3), 0, world)
            with line.section("thinking"):
                time.sleep(0.1)
    return line


def test_a_timeline_tells_computing_from_waiting():
    sender, receiver = launch(late_sender, ranks=2)
    waited = next(span for span in receiver.spans() if span.kind == "waiting")
    thought = next(span for span in sender.spans() if span.name == "thinking")
    assert waited.start < thought.end <= waited.end
    assert receiver.seconds("waiting") > sender.seconds("waiting")
    assert sender.seconds("compute") >= 0.2 and receiver.seconds("compute") >= 0.1
    for line in (sender, receiver):
        spans = line.spans()
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
        whole = sum(span.seconds for span in spans)
        assert whole == pytest.approx(line.end - line.start, rel=1e-6)
        assert "thinking" in {span.name for span in spans if span.kind == "compute"}


def test_of_two_sections_the_inner_names_what_is_computed():
    def work(world):
        with timeline() as line, line.section("step"):
            time.sleep(0.02)
            with line.section("forward"):
                time.sleep(0.02)
            time.sleep(0.02)
        return [span.name for span in line.spans() if span.name != "compute"]

    assert launch(work, ranks=1) == [["step", "forward", "step"]]


def test_timelines_of_all_ranks_share_a_clock_and_make_rows(tmp_path):
    lines = Timelines(launch(late_sender, ranks=2))
    rows = dict(lines.rows())
    assert list(rows) == ["rank 0", "rank 1"]
    sent = next(end for _, end, kind, name in rows["rank 0"] if name == "send")
    came = max(end for _, end, kind, name in rows["rank 1"] if kind == "waiting")
    assert abs(sent - came) < 0.1

    lines.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert {event["cat"] for event in spans} >= {"compute", "waiting"}


def test_background_work_is_a_track_of_its_own_and_waiting_for_it_is_waiting():
    def work(world):
        with timeline() as line:
            task = background(all_reduce, torch.ones(125_000), world, algorithm="ring")
            task.wait()
        return line

    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(gbit_s=0.01))
    for line in launch(work, ranks=2, cluster=cluster):
        assert line.tracks() == [0, 1]
        assert {span.name for span in line.spans(1)} == {"all_reduce"}
        assert line.seconds("communication", track=1) > max(0.3, line.seconds("waiting", track=1))
        assert line.seconds("waiting") > 0.7 * (line.end - line.start)


def test_meters_outside_a_rank_say_so():
    for meter in (bill, timeline):
        with pytest.raises(RuntimeError, match="launch"), meter():
            pass
