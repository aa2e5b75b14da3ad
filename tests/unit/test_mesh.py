"""The mesh's table, written out by hand and against its device meshes; the layout of a parameter; who reads items and who speaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmspeed.axes import DENSE, EXPERT, NODES, STAGES, STORAGE, AxisName, AxisSizes, MeshTable, Reader, mesh_table
from mmspeed.config.parallel import AXES, ParallelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.gradients import squared_norm
from mmspeed.mesh import Mesh, ParameterLayout, by_mesh, layout_of, make_mesh

CPU = Device("cpu", 0)
PP, DP_REPLICATE, DP_SHARD, DSP, RING, ULYSSES, TP = DENSE
_, _, SHARD, _ = STORAGE
_, _, EDP, EP, ETP = EXPERT

# world and sizes of tables that all views must hold for
CASES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "experts": (8, {"ep": 4}),
    "experts over nodes": (8, {"ep": 4, "ep_inner": 2}),
    "experts over tp": (8, {"tp": 2, "ep": 4}),
    "tp inside experts": (8, {"tp": 2, "ep": 2, "etp": 2}),
    "stages": (8, {"pp": 2, "ep": 2}),
    "sequence": (8, {"ring": 2, "ulysses": 2, "tp": 2}),
    "re-sharding": (8, {"dsp": 2, "ulysses": 2, "tp": 2}),
    "all": (64, {"pp": 2, "dp_replicate": 2, "ring": 2, "ulysses": 2, "tp": 2, "ep": 8, "ep_inner": 4, "etp": 2}),
}


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Inside, this process is a rank of a world in which nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def peers(
    table: MeshTable, rank: int, axes: tuple[AxisName, ...], view: tuple[AxisName, ...] | None = None
) -> list[int]:
    """The ranks that differ from a rank by their places on `axes` alone, itself among them, in order."""
    own = table.place(rank, view)
    others = [(other, table.place(other, view)) for other in range(table.world)]
    return [other for other, at in others if all(at[axis] == own[axis] for axis in own if axis not in axes)]


def groups(table: MeshTable, *axes: AxisName, view: tuple[AxisName, ...] = EXPERT) -> list[list[int]]:
    """The groups of ranks along axes, each once."""
    results = {tuple(peers(table, rank, axes, view)) for rank in range(table.world)}
    return sorted(list(group) for group in results)


@pytest.mark.parametrize("case", CASES)
def test_every_view_is_all_ranks_in_their_order(case: str) -> None:
    world, sizes = CASES[case]
    table = mesh_table(world, AxisSizes(**sizes))
    assert table.world == world
    for view in (DENSE, STORAGE, EXPERT, NODES):
        places = [tuple(table.place(rank, view)[axis] for axis in view) for rank in range(world)]
        assert places == list(itertools.product(*(range(size) for size in table.shape(view))))
        assert [table.place(rank, view)[PP] for rank in range(world)] == [
            table.place(rank)[PP] for rank in range(world)
        ]


def test_experts_go_over_the_tensor_parallel_ranks_or_are_split_by_them() -> None:
    over = mesh_table(8, AxisSizes(tp=2, ep=4))  # dp_shard 4: 8 ranks share one copy
    assert over.sizes[DP_SHARD] == 4 and over.sizes[EDP] == 2
    assert groups(over, EP) == [[0, 1, 2, 3], [4, 5, 6, 7]] and groups(over, ETP) == [[r] for r in range(8)]
    inside = mesh_table(8, AxisSizes(tp=2, ep=2, etp=2))
    assert groups(inside, ETP) == groups(inside, TP, view=DENSE) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(inside, EP) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(inside, EDP) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_stages_are_outermost_and_experts_stay_inside_of_one() -> None:
    table = mesh_table(8, AxisSizes(pp=2, ep=2))
    assert groups(table, PP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(table, EP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(table, EDP) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [table.knows_loss(rank) for rank in range(8)] == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"dp_replicate": -1, "dp_shard": -1}, "only one of"),
        (8, {"tp": 3}, r"dp_shard=-1 x tp=3 does not make the 8 processes"),
        (8, {"pp": 2, "dp_shard": 8}, r"pp=2 x dp_shard=8 does not make the 8"),
        (2, {"dp_shard": 1}, "one device does not make the 2"),
        (8, {"ep": 3}, r"ep 3 does not divide the 8 devices"),
        (8, {"dp_replicate": 2, "ep": 8}, r"ep 8 does not divide the 4 devices"),
        (8, {"ep": 4, "ep_inner": 3}, "ep_inner divide ep"),
        (8, {"ep": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mesh_table(world, AxisSizes(**sizes))


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        mesh_table(2).place(2)


def test_names_are_strings_wherever_they_are_written() -> None:
    assert json.dumps({AxisName.TP: AxisName.DP_SHARD}) == '{"tp": "dp_shard"}'
    assert f"{AxisName.EP_OUTER} {AxisName.PP!s}" == "ep_outer pp" and {AxisName.RING: 1}["ring"] == 1  # type: ignore[index]


def test_a_config_names_axes_of_the_dense_view() -> None:
    assert [axis for axis in DENSE if axis in AXES] == list(AXES)
    parallel = ParallelConfig(dp_replicate=2, ring=2, ulysses=3, tp=4)
    assert list(parallel.sizes()) == list(AXES) and mesh_table(48, AxisSizes(**parallel.sizes())).sizes[DP_SHARD] == 1
    replicas = mesh_table(48, AxisSizes(**parallel.sizes(sharded=False)))
    assert (replicas.sizes[DP_REPLICATE], replicas.sizes[DP_SHARD]) == (2, 1)
    assert parallel.group == parallel.together(split=True) == 24 and parallel.together(split=False) == 4
    assert parallel.group_in_words() == "ring 2 x ulysses 3 x tp 4"
    parallel.check_world(48)
    with pytest.raises(UserError, match="ring 2 x ulysses 3 x tp 4 does not divide the 36 processes"):
        parallel.check_world(36)


@pytest.mark.parametrize("case", CASES)
def test_groups_read_the_same_and_one_of_each_speaks(case: str) -> None:
    world, sizes = CASES[case]
    table = mesh_table(world, AxisSizes(**sizes))
    stage = world // table.sizes[PP]
    for split in (True, False):
        together = table.sizes[TP] * (table.sizes[DSP] * table.sizes[RING] * table.sizes[ULYSSES] if split else 1)
        for rank in range(world):  # inside of a stage, ranks of a group follow one another
            assert table.reader(rank, split) == Reader(rank % stage // together, stage // together)
            assert table.in_stage(rank) == Reader(rank % stage, stage)
    speaking = [rank for rank in range(world) if table.first_of_group(rank)]
    assert all(table.knows_loss(rank) for rank in speaking)
    lanes = table.reader(0).count
    assert [table.reader(rank).index for rank in speaking] == list(range(lanes))


@pytest.mark.parametrize("case", CASES)
def test_device_meshes_are_the_table(case: str) -> None:
    world, sizes = CASES[case]
    for rank in {0, world // 3, world - 1}:
        with fake_world(rank, world):
            mesh = make_mesh(CPU, AxisSizes(**sizes))
            split = sizes.get("ep", 1) * sizes.get("etp", 1) > 1
            assert (mesh.expert is not None) == split and mesh.rank == rank
            for names, view in (
                (DENSE, mesh.dense),
                (STORAGE, mesh.storage),
                (EXPERT, mesh.expert),
                (NODES, mesh.nodes),
            ):
                for axis in names if view is not None else ():
                    assert view is not None and view.mesh_dim_names == names
                    assert view[axis.value].mesh.tolist() == peers(mesh.table, rank, (axis,), names)
                    assert mesh.size(axis) == mesh.size(axis.value) == view[axis.value].size()
            assert mesh.reader() == mesh.table.reader(rank) and mesh.in_stage == mesh.table.in_stage(rank)
            assert mesh.knows_loss == mesh.table.knows_loss(rank)
            assert mesh.first_of_group == mesh.table.first_of_group(rank)
            assert len(mesh.across_stages()) == (sizes.get("pp", 1) > 1)
            for group in mesh.across_stages():
                assert dist.get_process_group_ranks(group) == peers(mesh.table, rank, STAGES)


def test_submeshes_are_of_views_that_hold_parameters() -> None:
    with fake_world(0, 8):
        mesh = make_mesh(CPU, AxisSizes(ep=2))
        assert mesh.submesh(AxisName.SHARD).mesh.tolist() == list(range(8))
        assert mesh.submesh(EDP, EP).mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(ValueError, match="no view of this mesh holds parameters along ring"):
            mesh.submesh(RING)
    with fake_world(0, 8), pytest.raises(ValueError, match="along edp"):
        make_mesh(CPU).submesh(EDP)


def on(mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False))


def distinct(mesh: Mesh, layout: ParameterLayout) -> int:
    """Different parts of a parameter that there are."""
    return torch.Size(mesh.size(axis) for axis in layout.parts).numel()


def test_layouts_of_parameters() -> None:
    with fake_world(5, 32):
        mesh = make_mesh(
            CPU, AxisSizes(dp_replicate=2, ring=2, tp=2, pp=2, ep=4, ep_inner=2)
        )  # dp_shard 2, shard 4, edp 2
        held = mesh.submesh
        cases: list[tuple[torch.Tensor, tuple[AxisName, ...], tuple[AxisName, ...], int]] = [
            (torch.ones(2), (), (DP_REPLICATE, SHARD, TP), 16),
            (on(held(SHARD), Shard(0)), (SHARD,), (DP_REPLICATE, TP), 4),
            (on(held(DP_REPLICATE, SHARD), Replicate(), Shard(0)), (SHARD,), (DP_REPLICATE, TP), 4),
            (on(held(SHARD, TP), Shard(0), Shard(1)), (SHARD, TP), (DP_REPLICATE,), 2),
            (on(held(TP), Shard(1)), (TP,), (DP_REPLICATE, SHARD), 8),
            (on(held(EP), Shard(0)), (EP,), (DP_REPLICATE, EDP, ETP), 4),
            (on(held(EDP, EP), Shard(1), Shard(0)), (EDP, EP), (DP_REPLICATE, ETP), 2),
            (on(held(EDP, EP), Replicate(), Shard(0)), (EP,), (DP_REPLICATE, EDP, ETP), 4),
        ]
        for parameter, parts, replicas, copies in cases:
            layout = layout_of(parameter)
            assert layout == ParameterLayout(parts, replicas)
            assert mesh.copies(layout) == copies and copies * distinct(mesh, layout) * 2 == 32


def test_parameters_come_by_mesh_of_fewest_axes_first() -> None:
    with fake_world(0, 8):
        mesh = make_mesh(CPU, AxisSizes(tp=2, ep=2))
        split = [on(mesh.submesh(SHARD, TP), Shard(0), Shard(0)) for _ in range(2)]
        experts = on(mesh.submesh(EDP, EP), Shard(1), Shard(0))
        shards = [on(mesh.submesh(SHARD), Shard(0)) for _ in range(2)]
        plain = nn.Parameter(torch.ones(1))
        actual = by_mesh([split[0], shards[0], experts, plain, split[1], shards[1]])
        assert [list(map(id, some)) for some in actual] == [
            list(map(id, some)) for some in ([plain], shards, split, [experts])
        ]
        assert by_mesh([]) == []


def test_norms_of_shards_want_the_mesh_that_knows_their_replicas() -> None:
    with fake_world(0, 4):
        mesh = make_mesh(CPU, AxisSizes(dp_replicate=2))
        parameter = on(mesh.submesh(SHARD), Shard(0))
        parameter.grad = parameter.detach() * 2
        with pytest.raises(ValueError, match="needs the mesh"):
            squared_norm([parameter])
        assert squared_norm([parameter], mesh) == pytest.approx(4 * 6 / 2, rel=1e-6)
