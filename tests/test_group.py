"""Group and Mesh: arithmetic on ranks, the same on every rank, with nothing sent.

Groups that sort their ranks, a mesh whose first axis varies fastest, or an axis of full size that
takes the world's order would each fail one of the first tests of its half.
"""

import itertools
import pickle

import pytest
import torch

from s2s_lib import Group, Mesh, all_gather, launch


def world_at(rank, size=8):
    return Group(tuple(range(size)), rank)


def groups_along(mesh_of, *names, size=8):
    """The group over `names` as each rank of a world of `size` sees it."""
    return [mesh_of(world_at(rank, size))[names] for rank in range(size)]


def test_a_subgroup_keeps_the_order_given():
    groups = [world_at(rank).subgroup([5, 1, 3]) for rank in range(8)]
    assert [g and (g.ranks, g.rank, g.size) for g in groups] == [
        None,
        ((5, 1, 3), 1, 3),
        None,
        ((5, 1, 3), 2, 3),
        None,
        ((5, 1, 3), 0, 3),
        None,
        None,
    ]


def test_members_of_a_subgroup_are_places_in_its_parent_not_world_ranks():
    parent = world_at(6).subgroup([7, 6, 5])
    child = parent.subgroup([2, 1])
    assert child.ranks == (5, 6) and child.rank == 1


def test_a_subgroup_of_one_and_a_subgroup_of_all_are_groups_like_any_other():
    assert world_at(3).subgroup([3]) == Group((3,), 0)
    assert world_at(3).subgroup(range(8)) == world_at(3)
    assert world_at(0).subgroup(reversed(range(8))).ranks == (7, 6, 5, 4, 3, 2, 1, 0)


def test_a_group_is_a_value():
    a, b = world_at(2).subgroup([2, 0]), world_at(2).subgroup([2, 0])
    assert a == b and hash(a) == hash(b) and pickle.loads(pickle.dumps(a)) == a
    assert a != world_at(2).subgroup([0, 2])
    with pytest.raises(AttributeError):
        a.rank = 1
    assert repr(a) == "Group(ranks=(2, 0), rank=0)"


def test_the_key_of_a_group_depends_on_its_members_and_their_order_and_on_nothing_else():
    keys = {Group(order, 0).key for order in itertools.permutations(range(4))}
    assert len(keys) == 24
    assert {world_at(rank).key for rank in range(8)} == {world_at(0).key}
    assert Group([0, 1], 0).key == Group((0, 1), 1).key


@pytest.mark.parametrize("member", [8, -1, 1.0, True, "1", None, torch.tensor(1)])
def test_a_subgroup_refuses_a_member_that_does_not_exist(member):
    with pytest.raises(ValueError, match=r"is not a rank of this group of 8.*0\.\.7") as error:
        world_at(0).subgroup([0, member])
    assert repr(member) in str(error.value)


def test_a_subgroup_refuses_repeated_members_and_none_at_all():
    with pytest.raises(ValueError, match=r"each once; got \[1, 1\]"):
        world_at(0).subgroup([1, 1])
    with pytest.raises(ValueError, match=r"at least one rank.*got \[\]"):
        world_at(0).subgroup([])
    with pytest.raises(TypeError, match="needs a list of ranks, got 3"):
        world_at(0).subgroup(3)


def test_a_group_made_by_hand_is_checked_too():
    with pytest.raises(ValueError, match=r"each rank once, got \[0, 1, 0\]"):
        Group((0, 1, 0), 0)
    with pytest.raises(ValueError, match="rank 2 is not a place in a group of 2"):
        Group((0, 1), 2)


def test_the_last_axis_of_a_mesh_varies_fastest():
    meshes = [Mesh(world_at(rank), dp=2, pp=2, tp=2) for rank in range(8)]
    assert [tuple(mesh.coordinate.values()) for mesh in meshes] == list(
        itertools.product(range(2), repeat=3)
    )
    assert meshes[5]["tp"].ranks == (4, 5) and meshes[5]["tp"].rank == 1
    assert meshes[5]["pp"].ranks == (5, 7) and meshes[5]["pp"].rank == 0
    assert meshes[5]["dp"].ranks == (1, 5) and meshes[5]["dp"].rank == 1


def test_a_group_over_two_axes_has_the_last_named_fastest():
    mesh = Mesh(world_at(5), dp=2, pp=2, tp=2)
    assert mesh["dp", "tp"].ranks == (0, 1, 4, 5) and mesh["dp", "tp"].rank == 3
    assert mesh["tp", "dp"].ranks == (0, 4, 1, 5) and mesh["tp", "dp"].rank == 3
    assert mesh["dp", "pp", "tp"] == world_at(5)
    assert mesh[()].ranks == (5,)


@pytest.mark.parametrize("names", [("dp",), ("pp",), ("tp",), ("dp", "tp"), ("pp", "dp", "tp")])
def test_the_groups_along_an_axis_cut_the_world_and_members_agree(names):
    groups = groups_along(lambda world: Mesh(world, dp=2, pp=3, tp=4), *names, size=24)
    assert all(group.ranks[group.rank] == rank for rank, group in enumerate(groups))
    distinct = {group.ranks for group in groups}
    assert sorted(itertools.chain(*distinct)) == list(range(24))
    assert all(groups[member].ranks == ranks for ranks in distinct for member in ranks)


def test_uneven_axes_follow_the_declared_order():
    mesh = Mesh(world_at(11, 12), pp=2, dp=2, tp=3)
    assert mesh.coordinate == {"pp": 1, "dp": 1, "tp": 2} and list(mesh.axes) == ["pp", "dp", "tp"]
    assert mesh["tp"].ranks == (9, 10, 11) and mesh["pp"].ranks == (5, 11)


def test_a_mesh_over_a_permuted_group_is_permuted():
    """The rows of [[0, 2], [1, 3]] are 0, 2 and 1, 3; an axis of full size keeps 3, 1, 2, 0."""
    rows = groups_along(lambda w: Mesh(w.subgroup([0, 2, 1, 3]), dp=2, tp=2), "tp", size=4)
    assert [group.ranks for group in rows] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    full = groups_along(lambda w: Mesh(w.subgroup([3, 1, 2, 0]), dp=1, tp=4), "tp", size=4)
    assert {group.ranks for group in full} == {(3, 1, 2, 0)}


def test_place_and_coordinate_are_inverse():
    mesh = Mesh(world_at(0, 12), dp=2, pp=3, tp=2)
    coordinates = [mesh.coordinate_of(place) for place in range(12)]
    assert [mesh.place_of(coordinate) for coordinate in coordinates] == list(range(12))
    with pytest.raises(ValueError, match=r"rank 12 is not a rank of this group of 12"):
        mesh.coordinate_of(12)


def test_axes_of_one_and_a_world_of_one_need_no_special_case():
    mesh = Mesh(world_at(2, 4), dp=1, tp=4, pp=1)
    assert mesh["dp"].ranks == mesh["pp"].ranks == (2,) and mesh["tp"].size == 4
    assert Mesh(world_at(0, 1), dp=1, tp=1)["dp", "tp"].ranks == (0,)
    assert Mesh(world_at(0, 1)).coordinate == {}


def test_a_mesh_shows_its_axes_and_where_it_is():
    assert repr(Mesh(world_at(5), dp=4, tp=2)) == "Mesh(dp=4, tp=2) at {'dp': 2, 'tp': 1}"


def test_sizes_that_do_not_make_the_world_are_refused_with_the_factors():
    with pytest.raises(ValueError, match="dp 3 x tp 2 makes 6 ranks, the group has 8"):
        Mesh(world_at(0), dp=3, tp=2)
    with pytest.raises(ValueError, match="no axes makes 1 ranks, the group has 8"):
        Mesh(world_at(0))


@pytest.mark.parametrize("size", [0, -2, 2.0, True, "2", None])
def test_an_axis_needs_a_whole_number(size):
    with pytest.raises(ValueError, match="axis tp needs a whole number of at least 1") as error:
        Mesh(world_at(0), dp=4, tp=size)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize("names", ["pp", ("dp", "pp"), ("dp", "dp"), 0, None])
def test_an_axis_that_does_not_exist_is_refused_with_those_that_do(names):
    with pytest.raises(KeyError, match=r"name each of \['dp', 'tp'\] at most once"):
        Mesh(world_at(0), dp=4, tp=2)[names]


def test_a_mesh_needs_a_group():
    with pytest.raises(TypeError, match="expected a Group, got None"):
        Mesh(None, dp=2)


def test_groups_made_in_any_order_by_their_members_alone_do_not_mix():
    """Ranks 0 and 3 never speak of group [1, 2], and make theirs in another order than a rank
    that lives in both; every group gathers its own members' values in its own order."""

    def gather_in_three_groups(world):
        mine = torch.tensor([world.rank])
        orders = [[0, 3], [2, 1], [3, 1, 0, 2]]
        if world.rank == 3:
            orders.reverse()
        groups = {tuple(order): world.subgroup(order) for order in orders}
        present = [groups[tuple(order)] for order in ([0, 3], [2, 1], [3, 1, 0, 2])]
        return [all_gather(mine, group).tolist() for group in present if group]

    assert launch(gather_in_three_groups, ranks=4) == [
        [[0, 3], [3, 1, 0, 2]],
        [[2, 1], [3, 1, 0, 2]],
        [[2, 1], [3, 1, 0, 2]],
        [[0, 3], [3, 1, 0, 2]],
    ]


def test_a_mesh_of_64_ranks_costs_nothing_to_make():
    meshes = [Mesh(world_at(rank, 64), dp=4, pp=4, tp=4) for rank in range(64)]
    assert {mesh["dp", "tp"].size for mesh in meshes} == {16}


def test_a_group_of_this_world_must_name_ranks_that_exist_and_the_place_of_this_process():
    def misuse(world):
        said = []
        for group in (Group((world.rank, 9), 0), Group((1, 0), world.rank)):
            try:
                all_gather(torch.ones(1), group)
            except ValueError as error:
                said.append(str(error))
        return said

    first, second = launch(misuse, ranks=2)
    assert first[0] == "group [0, 9] names rank 9, the world has ranks 0..1"
    assert second[0] == "group [1, 9] names rank 9, the world has ranks 0..1"
    assert (
        "this is rank 0 of the world, but its place 0 in group [1, 0] is that of rank 1"
        in (first[1])
    )
