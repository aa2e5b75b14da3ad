"""Apply a plan to a model: put its boundaries in place, some inside and some outside of checkpointing and compiled graphs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmspeed.axes import AxisName
from mmspeed.comm import Axis, ExchangeMethod, Ledger
from mmspeed.comm.groups import flattened
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.memory.recompute.block_checkpoint import replay_checkpoints
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.parallel.tensor import check_heads
from mmspeed.protocols.plan import (
    Attended,
    Linear,
    ModelPlan,
    Seen,
    Summed,
    base_of_adapters,
    declare_plan,
    modules_like,
    named_like,
    plan_of,
)

from .attention_sites import CalledSite, InterceptedSite, SiteBoundary, sparse_layer
from .boundary import Bounded, Grid, ModuleBoundary, Root, RootBoundary
from .layout import TokenLayout
from .linears import (
    Entering,
    HasRole,
    Leaving,
    LinearBoundary,
    SplitHead,
    SplitNorm,
    SplitPreparingLinear,
    split_layer,
    split_norm,
    was_used,
)
from .names import argument_names, check_plan, check_positions, check_sequences, described
from .record import Sequences


@dataclass
class Boundaries:
    """The boundaries of one model, made from its plan.

    `put_inside` comes before activation checkpointing and torch.compile are applied, `put_around` after them.
    Raises UserError for a plan that does not fit the model, and for a module whose forward has been replaced.
    """

    model: nn.Module
    sequences: Sequences
    check_inputs: bool = False
    grid: Grid | None = None
    sites: list[tuple[str, nn.Module, SiteBoundary]] = field(init=False)
    boundaries: dict[str, ModuleBoundary] = field(init=False)

    def __post_init__(self) -> None:
        check_plan(self.model, self.plan)
        if self.sequences.layout.size > 1:
            check_sequences(self.plan)
        known = root_of(self.model)
        if known is not None:  # the model was made sparse before this
            self.grid = self.grid or known.grid
        self.sites, self.boundaries = self._sites(), self._module_boundaries()
        for _, module, at in self.sites:
            if isinstance(module, ClusteredAttention) and self.sequences.may_cross(at.site.queries[0], at.attends):
                check_positions(self.plan, at.site.queries[0], at.attends, at.where)
        bounded = dict.fromkeys((*self.boundaries, *(name for name, _, _ in self.sites), ""))
        for name, module in ((name, self.model.get_submodule(name)) for name in bounded):
            if "forward" in vars(module):
                raise UserError(
                    f"the forward of {described(name, module)} has been replaced (hooks of diffusers or accelerate do); spread the model "
                    "over processes, or make it sparse, before"
                )

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.sequences.plan

    # -- the order of techniques: see `mmspeed.parallel.parallelize` ----------------------------------------------------

    def split_weights(self, mesh: DeviceMesh) -> None:
        """Split the weights of layers with roles over the tensor-parallel axis `mesh`. Raises UserError where they do not divide."""
        plan, tp = self.plan, mesh.size()
        if plan.heads is not None:
            check_heads(plan.heads, 1, tp, plan.key_heads)
        layers = [
            (name, layer, linear)
            for pattern, linear in plan.linears.items()
            for name, layer in modules_like(self.model, pattern, "plan, linears")
        ]
        tied = self._tied({name: linear for name, _, linear in layers})
        for name, layer, linear in layers:
            split_layer(layer, mesh, linear, self.sequences, name, self.attends(name))
        for first, *others in tied:
            for name in others:
                self.model.get_submodule(name).register_parameter("weight", self.model.get_parameter(f"{first}.weight"))
        for pattern in plan.channel_norms:
            for name, norm in modules_like(self.model, pattern, "plan, channel_norms"):
                split_norm(norm, self.sequences, name, self.attends(name))
        for pattern, attributes in plan.divided.items():
            for name, module in modules_like(self.model, pattern, "plan, divided"):
                for attribute in attributes:
                    _divide(module, attribute, tp, name)

    def put_inside(self) -> None:
        """Put attentions in place, and the boundaries of modules other than blocks."""
        for _, module, at in self.sites:
            if at.site.calls:
                mixed = mix_in(module, CalledSite, rename=False)
                mixed._site, mixed._crosses = at, at.may_cross
            else:
                mix_in(module, InterceptedSite, rename=False)._site = at
        around = {block.name for block in self.plan.blocks} | self._travelling().keys()
        for name, boundary in self.boundaries.items():
            if name and name not in around:
                mix_in(self.model.get_submodule(name), Bounded, rename=False)._boundary = boundary

    def put_around(self) -> None:
        """Put the exchanges around split layers, and the boundaries of blocks and of the model itself, around everything else."""
        travelling, boundaries = self._travelling(), self.boundaries
        for name, linear in travelling.items():
            module = self.model.get_submodule(name)
            if linear.enters and not isinstance(module, SplitPreparingLinear | SplitHead):
                mix_in(module, Entering, rename=False)._enters = linear
            if linear.leaves and not isinstance(module, SplitHead):
                mix_in(module, Leaving, rename=False)
        blocks = {block.name for block in self.plan.blocks}
        for name in (blocks | travelling.keys()) & boundaries.keys():
            mix_in(self.model.get_submodule(name), Bounded, rename=False)._boundary = boundaries[name]
        root = boundaries.get("") or self._boundary("", self.model)
        # diffusers writes the class's name into a checkpoint's config
        mix_in(self.model, Root, rename=False)._root = RootBoundary(root, self.check_inputs, self.grid)
        replay_checkpoints(self.model)

    # -- boundaries and sites -------------------------------------------------------------------------------------------

    def attends(self, name: str) -> Attended:
        """The dim along which the block that holds a module attends.

        For a module before all blocks it is that of the first block, for one after them that of the last.
        """
        blocks = self.plan.blocks
        for block in blocks:
            if name == block.name or name.startswith(f"{block.name}."):
                return block.attends
        if not blocks:
            return "columns"
        around = list(itertools.accumulate(name.split("."), lambda outer, own: f"{outer}.{own}"))
        after = any(named_like(module, pattern) for module in around for pattern in self.plan.after)
        return self.plan.attends_all[-1 if after else 0]

    def _travelling(self) -> dict[str, LinearBoundary]:
        """Split layers that exchange tokens, by the name of the module around which they do.

        That is the layer itself or, for a column layer of an MLP that runs in chunks, the module that expands tokens with it: its input is
        gathered before it is cut into chunks.
        """
        expansions = {
            f"{block.name}.{chunk.up}": f"{block.name}.{chunk.expands}"
            for block, chunk in itertools.product(self.plan.blocks, self.plan.chunks)
            if chunk.expands is not None
        }
        boundaries = {}
        for name, module in self.model.named_modules():
            if isinstance(module, HasRole) and _moves(module._linear):
                own = isinstance(module, SplitPreparingLinear) or module._linear.leaves
                boundaries[name if own else expansions.get(name, name)] = module._linear
        return boundaries

    def _boundary(self, name: str, module: nn.Module) -> ModuleBoundary:
        names = [block.name for block in self.plan.blocks]
        place = names.index(name) if name in names else 0
        before = self.plan.blocks[place - 1].attends if place else self.attends(name)
        if name in names:
            before = self.plan.blocks[place].follows or before
        where = described(name, module)
        own = argument_names(type(base_of_adapters(module)))  # an adapter passes its arguments on
        last = self.plan.attends_all[-1] if self.plan.attends_all and not name else None
        return ModuleBoundary(self.sequences, where, self.attends(name), own, before, gives=last)

    def _module_boundaries(self) -> dict[str, ModuleBoundary]:
        """The boundaries for the plan's inputs, outputs and tokens of blocks, by module name; none on one process."""
        boundaries: dict[str, ModuleBoundary] = {}
        layout = self.sequences.layout
        tp = layout.tensor.size > 1
        if layout.size == 1:
            return boundaries

        def of(name: str, module: nn.Module) -> ModuleBoundary:
            return boundaries.setdefault(name, self._boundary(name, module))

        for pattern, inputs in self.plan.inputs.items():
            moved = {k: what for k, what in inputs.items() if tp or not isinstance(what, Seen)}
            for name, module in modules_like(self.model, pattern, "plan, inputs") if moved else ():
                of(name, module).inputs.update(moved)
        for pattern, outputs in self.plan.outputs.items():
            changes = {k: what for k, what in outputs.items() if tp or not isinstance(what, Seen | Summed)}
            for name, module in modules_like(self.model, pattern, "plan, outputs") if changes else ():
                of(name, module).outputs.update(changes)
        for block in self.plan.blocks:
            if block.tokens:
                of(block.name, self.model.get_submodule(block.name)).tokens.update(block.tokens)
        return boundaries

    def _sites(self) -> list[tuple[str, nn.Module, SiteBoundary]]:
        """Attentions that may attend to tokens on other processes, and those that were made sparse.

        Raises UserError for a sparse one that the plan does not name, or that is joint and also split over processes.
        """
        layout, sites = self.sequences.layout, []
        for pattern, site in self.plan.attention.items():
            for name, module in modules_like(self.model, pattern, "plan, attention"):
                sparse = sparse_layer(module) is not None
                if sparse and len(site.queries) > 1 and layout.whole.size > 1 and not self.sequences.apart:
                    raise UserError(
                        f"{described(name, module)}: joint attention of {' and '.join(site.queries)} is either sparse or split over "
                        "processes for now, not both: use dp, tp or strategy: fsdp beside sparse attention"
                    )
                at = SiteBoundary(self.sequences, described(name, module), self.attends(name), site)
                empty = site.calls and at.keys == site.queries and layout.whole.size > 1  # of tokens, on some process
                if sparse or empty or at.may_cross:
                    sites.append((name, module, at))
        known = {name for name, _, _ in sites}
        for name, module in self.model.named_modules():
            if name not in known and sparse_layer(module) is not None:
                raise UserError(
                    f"{described(name, module)} is sparse, and the plan of {type(self.model).__name__} does not name it in `attention`"
                )
        return sites

    def _tied(self, roles: Mapping[str, Linear]) -> list[list[str]]:
        """Groups of names of layers that share one weight (an embedding and its head), whose rows all of them split alike.

        Raises UserError for a layer that shares its weight with any other module: once split, they would no longer be the same.
        """
        every, tied = list(self.model.named_parameters(remove_duplicate=False)), dict[int, list[str]]()
        for name in roles:
            layer = self.model.get_submodule(name)
            own = {id(parameter) for parameter in layer.parameters(recurse=base_of_adapters(layer) is not layer)}
            for other, parameter in every:
                if id(parameter) not in own or other.startswith(f"{name}."):
                    continue
                pair = [roles.get(each) for each in (name, other.removesuffix(".weight"))]
                if any(linear is None or linear.role not in ("vocabulary", "embedding") for linear in pair):
                    raise UserError(
                        f"parallel.tp: {described(name, layer)} has a role in the plan and shares its weight with {other}; name no role, "
                        "or give each its own weight"
                    )
                tied.setdefault(id(parameter), []).append(name)
        return list(tied.values())


def _divide(module: nn.Module, attribute: str, tp: int, name: str) -> None:
    value: int = vars(module)[attribute]  # an int, by `check_plan`
    if value % tp:
        raise UserError(f"parallel.tp {tp} does not divide {name}.{attribute}, which is {value}")
    setattr(module, attribute, value // tp)


def root_of(model: nn.Module) -> RootBoundary | None:
    """The boundary of a whole model; None if no plan is applied to it."""
    return model._root if isinstance(model, Root) else None


def is_spread(model: nn.Module) -> bool:
    """True for a model that, as a whole or in part, computes one sample on several processes."""
    roots = [module._root for module in model.modules() if isinstance(module, Root)]
    return any(root.boundary.sequences.layout.size > 1 for root in roots)


def token_layout(model: nn.Module) -> TokenLayout:
    """The layout with which a plan was applied to a model; that of a single process if none was."""
    root = root_of(model)
    return TokenLayout() if root is None else root.boundary.sequences.layout


def uncrossed(model: nn.Module) -> list[str]:
    """Names of the boundaries and split layers that no forward has used since the plan was applied: signs of a mistake in the plan."""
    boundaries: list[tuple[str, Mapping[str, int]]] = []
    for module in model.modules():
        if isinstance(module, Bounded):
            boundaries.append((module._boundary.where, module._boundary.sequences.uses))
        if isinstance(module, CalledSite | InterceptedSite):
            boundaries.append((module._site.where, {module._site.where: module._site.met}))
        if isinstance(module, HasRole | SplitNorm):
            linear = module._linear
            travels = isinstance(module, SplitNorm) or _moves(linear)
            boundaries.append((linear.where, linear.sequences.uses if travels else {linear.where: was_used(module)}))
    return [where for where, uses in boundaries if not uses[where]]


def _moves(boundary: LinearBoundary) -> bool:
    return boundary.enters or boundary.leaves


def sequence_axes(
    mesh: DeviceMesh,
    *,
    window: int | None = None,
    exchange: ExchangeMethod = "collective",
    ledger: Ledger | None = None,
    nodes: Sequence[int] | None = None,
) -> SequenceAxes:
    """The axes `ring` and `ulysses` of a mesh; an axis that the mesh lacks has one rank. `nodes`: as in `Axis.of`.

    With a `window`, hops between windows get a process group of their own, for which the mesh must cover all processes.
    """
    ledger = ledger if ledger is not None else Ledger()
    present = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} & set(present):
        raise UserError(f"sequence_parallel: the mesh has the axes {list(present)}; one must be named ring or ulysses")
    ring, ulysses = (
        Axis.of(mesh, name, ledger, exchange, nodes) if name in present else Axis.alone(name)
        for name in ("ring", "ulysses")
    )
    outer = None
    if window is not None and window < ring.size:
        ranks = mesh.mesh.movedim(present.index("ring"), -1).reshape(-1, ring.size)
        outer = replace(ring, group=dist.new_subgroups_by_enumeration(ranks.tolist())[0])
    return SequenceAxes(ring, ulysses, window, outer)


def make_layout(
    mesh: Mesh | None,
    parallel: ParallelConfig | None = None,
    ledger: Ledger | None = None,
    nodes: Sequence[int] | None = None,
) -> TokenLayout:
    """The layout of tokens over the processes of a mesh; without a mesh, all are on one process.

    `nodes`: the node of each rank, for the ledger's bytes by link; None: from the launcher's LOCAL_WORLD_SIZE. Makes process groups: every
    process of the run must call it.
    """
    if mesh is None:
        return TokenLayout()
    parallel, ledger = parallel or ParallelConfig(), ledger or Ledger()
    axes = sequence_axes(
        mesh.dense, window=parallel.ring_window, exchange=parallel.exchange, ledger=ledger, nodes=nodes
    )
    dsp = Axis.of(mesh.dense, AxisName.DSP.value, ledger, parallel.exchange, nodes)
    hybrid = flattened("sequence", axes.ring, axes.ulysses, mesh=mesh.dense, nodes=nodes)

    def of_experts(axis: AxisName) -> Axis:
        if mesh.expert is None:
            return Axis.alone(axis.value)
        return Axis.of(mesh.expert, axis.value, ledger, parallel.exchange, nodes)

    return TokenLayout(
        axes=axes,
        hybrid=hybrid,
        dsp=dsp,
        whole=hybrid
        if dsp.size == 1
        else flattened("sequence", dsp, axes.ring, axes.ulysses, mesh=mesh.dense, nodes=nodes),
        tensor=Axis.of(mesh.dense, AxisName.TP.value, ledger, parallel.exchange, nodes),
        shard="rows" if parallel.shard == "frames" else "columns",
        text_from=parallel.shard_text,
        experts=of_experts(AxisName.EP),
        etp=of_experts(AxisName.ETP),
        ep_backend=parallel.ep_backend,
        stages=Axis.of(mesh.dense, AxisName.PP.value, ledger, parallel.exchange, nodes),
        nodes=None
        if mesh.nodes is None
        else (
            Axis.of(mesh.nodes, AxisName.EP_OUTER.value, ledger, parallel.exchange, nodes),
            Axis.of(mesh.nodes, AxisName.EP_INNER.value, ledger, parallel.exchange, nodes),
        ),
    )


def sequence_parallel(
    model: nn.Module,
    mesh: DeviceMesh | SequenceAxes,
    plan: ModelPlan | None = None,
    *,
    window: int | None = None,
    exchange: ExchangeMethod = "collective",
    ledger: Ledger | None = None,
) -> nn.Module:
    """Make `model`, in place, compute each sample on all ranks of the axes `ring` and `ulysses` of `mesh` together, and return it.

    plan: what to split; None: the model's own attribute `plan`. window: the number of ranks of a double ring's inner ring. Every rank of a
    group must pass the same inputs (checked at the first forward) and gets the whole output. Apply it before activation checkpointing,
    torch.compile, FSDP or DDP, and average gradients over all ranks, including those of one group.

    Raises UserError for a plan that does not fit the model.
    """
    plan = plan if plan is not None else plan_of(model)
    if plan is None:
        raise UserError(
            f"sequence_parallel: no plan for {type(model).__name__}; give `plan=ModelPlan(...)`, or call "
            "mmspeed.accelerate_model, which knows plans of diffusers' models"
        )
    if not isinstance(plan, ModelPlan):
        raise UserError(f"sequence_parallel: the plan is a {type(plan).__name__}, not a ModelPlan")
    if is_spread(model):
        raise UserError(f"sequence_parallel: {type(model).__name__} is sequence-parallel already")
    if isinstance(mesh, SequenceAxes):
        axes = mesh
    else:
        axes = sequence_axes(mesh, window=window, exchange=exchange, ledger=ledger)
    one = axes.ring if axes.ulysses.size == 1 else axes.ulysses
    # with both axes, the mesh need not cover all processes, so no joint group can be made: gathers go over one axis, then the other
    hybrid = replace(
        one, name="sequence", size=axes.size, rank=axes.rank, group=one.group if one.size == axes.size else None
    )
    sequences = Sequences(plan, TokenLayout(axes, hybrid, whole=hybrid), shares_images=True)
    boundaries = Boundaries(model, sequences, check_inputs=True)
    declare_plan(model, plan)
    if axes.size > 1:
        boundaries.put_inside()
        boundaries.put_around()
    return model


def put_sparse_sites(model: nn.Module, plan: ModelPlan, grid: Grid) -> None:
    """Make the attentions that hold sparse layers use them, in place. `grid` returns the video's token grid of a forward."""
    known = root_of(model)
    layout = known.boundary.sequences.layout if known is not None else TokenLayout()
    sequences = known.boundary.sequences if known is not None else Sequences(plan, layout)
    boundaries = Boundaries(model, sequences, known.check_inputs if known is not None else False, grid)
    boundaries.put_inside()
    boundaries.put_around()
