"""Describe a model by a plan: data beside it that names its parts and where techniques may be applied to it.

A model is pure tensor code; `mmspeed.parallel.parallelize` reads its plan and applies tensor and sequence parallelism, sparse attention,
activation policies, chunks and compilation at the boundaries of its modules. Our own models and classes of diffusers or transformers use
the same plans. A plan holds no tensors and runs nothing.

Modules are named as in `named_modules`; in a pattern `*` stands for one whole or partial name between dots; "" is the model itself.
Names that the model lacks are errors of `parallelize`, which give the nearest ones.

A *sequence* (the tokens of a video, of a caption) lies along one dim of a tensor (`dim`, its columns) or along two (`rows` too: frames x
places of a frame). Each process holds a part of it. With tensor parallelism there are two levels: a process's *own* tokens, for norms and
modulation, and those *seen* by its tensor-parallel processes together between a column layer and its row layer, for rotary positions,
masks and attention. Without tensor parallelism both are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from mmspeed.errors import UserError, nearest

T = TypeVar("T")
Level = Literal["own", "seen"]
Attended = Literal["rows", "columns"]
# The role of a linear layer in its model. "column": each row of its weight makes a channel of its own (heads, hidden units);
# "row": its inputs are such channels. Between a column layer and its row layer channels never mix. "vocabulary": a column layer whose
# outputs are the whole vocabulary's logits, gathered; of a `TokenHead`, the losses of targets, from sums over the rows of each process.
# "embedding": a table with a row for each id, looked up for the tokens seen; its results, 0 for rows of others, are summed to own tokens.
Role = Literal["column", "row", "vocabulary", "embedding"]


@dataclass(frozen=True)
class Split:
    """A split that keeps this process's part of a tensor, or of each tensor in a list.

    Args:
        sequence: its name, or the names of several that follow one another along `dim` (a mask over [video, text]).
        dim: of the tensor, along which the sequence (its columns) lies.
        rows: the dim of its rows, where the tensor has one.
        level: the process's own tokens, or those that its tensor-parallel processes see together.
        ndim: a tensor with another number of dims stays whole.
        broadcast: a dim of size 1 stays whole.
        least: tokens that every process must get.
        channels: the dim of its channels or heads, of which a process keeps those of its tensor-parallel part.
        positions: the tensor (T, S, X) holds the tokens' positions along this dim; an attention across processes gets those of all.

    The first split of a forward pass gives a sequence's length; all others must agree.
    """

    sequence: str | tuple[str, ...]
    dim: int
    rows: int | None = None
    level: Level = "own"
    ndim: int | None = None
    broadcast: bool = False
    least: int = 0
    channels: int | None = None
    positions: Attended | None = None


def names_of(sequence: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of one sequence, of several, or of none."""
    if sequence is None:
        return ()
    return (sequence,) if isinstance(sequence, str) else sequence


@dataclass(frozen=True)
class Leading:
    """An integer argument, a number of tokens at the start of `sequence`, replaced by the number of them on this process."""

    sequence: str


@dataclass(frozen=True)
class Seen:
    """An all-gather over `tp` of a tensor: from this process's own tokens to those that its tensor-parallel processes see.

    For a module whose column layers share their input, such as the projections of queries, keys and values; or for the output of a norm
    that several modules take. `sequence`: as in `Split`; all tokens of the first sequence come first, then those of the next.
    """

    sequence: str | tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Summed:
    """A reduce-scatter over `tp` of a module's output: from parts of a sum, for the tokens seen, to the sum for own tokens.

    For a module that ends with a row layer without a sequence, and that cuts the tokens of several sequences apart after it.
    """

    sequence: str | tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Gather:
    """A gather that joins the parts of all processes along `dim`, and along `rows` where the tensor has them.

    level: the tensor holds a process's own tokens, or those that its tensor-parallel processes see together, which all of them have.
    """

    sequence: str
    dim: int
    rows: int | None = None
    level: Level = "own"


@dataclass(frozen=True)
class Total:
    """A sum, over all processes that share a sequence, of what each computes from its own tokens, such as statistics of a router."""

    sequence: str


Output = Split | Gather | Seen | Summed | Total  # a change to an output of a module


@dataclass(frozen=True)
class Tokens:
    """The running tokens of a block: re-sharded from the layout of the previous block to its own, where these differ."""

    sequence: str
    dim: int
    rows: int | None = None


@dataclass(frozen=True)
class Block:
    """A block: sharded, recomputed, compiled and measured as a whole. The order of blocks is that of their calls.

    attends: the dim of the tokens along which its attention runs; where there is one row (full attention, other libraries), "columns".
    tokens: its running tokens, by the arguments of its forward; only where blocks of one model attend along different dims.
    follows: what the block before it attends along, where that one may be gone; None: the one before it in the plan.
    """

    name: str
    attends: Attended = "columns"
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    follows: Attended | None = None


# The way in which an intercepted attention hides padding. "keys": a mask (B, 1, 1, M), or none. "pairs": a mask (B, 1, N, N) that shows
# pairs of tokens that both count. "trimmed": it is called once for each sample, (1, A, n, D), without the padding at the end.
# "whole": a mask (B, 1, N, N) of all tokens, whatever it shows, the same on all processes; without one, attention is as causal as the plan.
AttentionMasks = Literal["keys", "pairs", "trimmed", "whole"]
# The memory layout of queries, keys and values, outermost dim first, as all processes know it: B batch, A heads,
# G rows or columns that attend apart, N tokens, D head width. BNAD is the layout BSH of the projections, NBAD is SBH. Under BNGAD
# queries, keys, values and output are (B, G, A, N, D), and a mask's B is B x G; else they are (B, A, N, D).
AttentionLayout = Literal["BAND", "BNAD", "NBAD", "BNGAD"]


@dataclass(frozen=True)
class Site:
    """An attention of the model.

    queries, keys: the sequences that follow one another in its queries and in its keys (None: those of the queries).
    calls: the module is called with (q, k, v, structure) and does nothing else, as `AttentionSite` says. Otherwise it calls
        `F.scaled_dot_product_attention` once in its forward, and that call is replaced.
    sparse: sparse attention may be used here, in a model that is made sparse.
    layout: of its projections in blocks that attend along columns; `rows_layout`: in those that attend along rows, each column for itself.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    calls: bool = False
    sparse: bool = True
    masks: AttentionMasks = "keys"
    layout: AttentionLayout = "BNAD"
    rows_layout: AttentionLayout = "NBAD"


@dataclass(frozen=True)
class Linear:
    """The role of a linear layer, or of an embedding, under tensor parallelism.

    sequence, dim: the sequence whose own tokens are gathered before a column layer, or come back summed after a row layer; several where
        these follow one another along `dim`. None: tokens do not move; the layer's input is whole on all processes (a caption), or comes
        gathered (`Seen`), or a module around a row layer sums its results (`Summed`).
    joined: the widths of the tensors that are joined in a row layer's input, each of which has channels on all processes. Checkpoints and
        sharding cut the weight's columns in one piece; a process gets the columns that its channels need from the others before the
        product.
    """

    role: Role
    sequence: str | tuple[str, ...] | None = None
    dim: int = -2
    joined: tuple[int, ...] = ()

    @property
    def sequences(self) -> tuple[str, ...]:
        """The names of its sequences."""
        return names_of(self.sequence)


@dataclass(frozen=True)
class Region:
    """A part of a block's forward whose activations can have a policy of their own.

    modules: patterns of names within the block. small: it makes the one tensor that a product takes (a norm, an activation), and its
    modules are linear layers that prepare their input (`PreparesInput`). optional: blocks without its modules have no such region, and
    its policies pass them by.
    """

    modules: tuple[str, ...]
    small: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Chunked:
    """An MLP, within a block, whose hidden layer can be computed for some tokens at a time.

    up, down: its linear layers. expands: the module whose forward is `up` and the activation, where that is not `up` alone.
    activation: the elementwise function between them; None: `down` prepares its input itself (`PreparesInput`).
    """

    up: str
    down: str
    expands: str | None = None
    activation: Literal["gelu_tanh", "gelu", "silu"] | None = None


@dataclass(frozen=True)
class Hidden:
    """The dim of an experts' parameter that counts hidden units of an expert; those of `joined` tensors lie one behind the other there."""

    dim: int
    joined: int = 1


@dataclass(frozen=True)
class ModelPlan:
    """All that techniques need to know of a model.

    Args:
        blocks: in the order of their calls.
        inputs: module -> argument of its forward -> the change to it.
        outputs: module -> place in its output (0 for a single tensor; a key of a dict) -> the change to it.
        attention: attentions, by patterns.
        linears: roles of linear layers, by patterns; none: tensor parallelism is refused.
        heads: of attention, over all processes; None: not known.
        key_heads: of keys and values, where queries have more (grouped keys); None: as many.
        channel_norms: norms over all heads, whose mean square is summed over tensor-parallel processes, by patterns.
        divided: module pattern -> attributes that count heads or channels, divided by tensor-parallel processes.
        regions: parts of a block, by any name; the block as a whole is the region `block`.
        chunks: MLPs within a block.
        experts: modules of experts, by patterns, whose parameters are stacked by expert (dim 0) and whose forward takes (x_TE, weights_TK,
            expert_TK) and returns each token's weighted sum, (T, E); expert parallelism leaves each process some of them. A forward may
            take `beside` too, a module whose output for x_TE is added: the module is called with (x_TE, between=...), and calls `between()`
            once, after products that run while tokens travel and before those that run while outputs do. For each parameter the dim of
            its hidden units, along which `etp` splits it; without one for all of them, experts stay whole.
        mlps: MLPs, and layers of them, that are in no region, by patterns; only adapters ask for them.
        attends: what each block attends along, of a model of which some are gone; None: of no model.
        entering: the splits of carried arguments of the first block of such a model, which is met whether the block is gone or not.
        carried: the arguments of a block that the next block gets from its output, in the order of the outputs, which travel between
            pipeline stages; none: pipelines are refused.
        further: blocks return one more output, behind the carried ones, which may be None.
        summed: that output is summed over blocks: (argument of a block, dim) that give its length, or 1 without that argument; None: it
            does not travel.
        cuts: names of blocks before which a pipeline may cut the model; None: before any.
        before, after: modules that run before the first and after the last block.
        embeds: modules whose outputs reach the first block's carried arguments and nothing else, such as embeddings: of a pipeline the
            first stage alone holds them. One that is also in `after` (an embedding that a head shares) the last stage holds, too.
        draws: its blocks draw random numbers (dropout).
        image: (argument of the model's forward, dim) that gives the number of frames; dim None: the argument is that number. When it is 1
            no tokens are split over a group: every process computes its own.
        stills: its samples are images alone, which may have sparse attention, and whose tokens are split where a group shares them.
        causal: attention is causal; parts are then cut in zigzag order, in which all processes of a ring have equal work.
        packed: (argument of the model's forward, sequence). The argument holds cumulative lengths of documents over the tokens of all rows
            of the causal sequence, as `Structure.bounds_Z`; over a ring the tokens are then shared by documents, in one row. None: the
            argument, as no argument, says that each row is one document.
        long_text: this sequence is split only from the length on that the configuration sets (`parallel.shard_text`).
    """

    blocks: tuple[Block, ...]
    inputs: Mapping[str, Mapping[str, Split | Leading | Seen]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int | str, Output]] = field(default_factory=dict)
    attention: Mapping[str, Site] = field(default_factory=dict)
    linears: Mapping[str, Linear] = field(default_factory=dict)
    heads: int | None = None
    key_heads: int | None = None
    channel_norms: tuple[str, ...] = ()
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    chunks: tuple[Chunked, ...] = ()
    experts: Mapping[str, Mapping[str, Hidden]] = field(default_factory=dict)
    mlps: tuple[str, ...] = ()
    attends: tuple[Attended, ...] | None = None
    entering: Mapping[str, Split] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    further: bool = False
    summed: tuple[str, int] | None = None
    cuts: tuple[str, ...] | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    embeds: tuple[str, ...] = ()
    draws: bool = True
    image: tuple[str, int | None] | None = None
    stills: bool = False
    causal: bool = False
    packed: tuple[str, str] | None = None
    long_text: str | None = None

    @property
    def attends_all(self) -> tuple[Attended, ...]:
        """The dims along which the blocks of the whole model attend."""
        return self.attends if self.attends is not None else tuple(block.attends for block in self.blocks)

    @property
    def factorised(self) -> bool:
        """True where some blocks attend along rows, so that tokens can be re-sharded between blocks."""
        return "rows" in self.attends_all


@runtime_checkable
class DeclaresPlan(Protocol):
    """A model with a plan: its own, or one that `declare_plan` gave it."""

    plan: ModelPlan


@dataclass(frozen=True)
class Structure:
    """The inputs of an attention beside queries, keys and values; the plan's engine cuts them for a process.

    Args:
        key_mask_BN: bool, True at keys that count; None: all do.
        positions_NX: whole numbers, frame first, of the tokens along the attended dim; None where the attention needs none.
        image: the sample is an image, whose attention is dense.
        causal: each query sees the keys up to its own place.
        window: each query sees so many keys to either side.
        documents_BN: numbers of the documents of packed tokens, which see only their own document.
        bounds_Z: the same for documents that follow one another: cumulative lengths, from 0 to B x N, over the tokens of all rows.
    """

    key_mask_BN: Tensor | None = None
    positions_NX: Tensor | None = None
    image: bool = False
    causal: bool = False
    window: int | None = None
    documents_BN: Tensor | None = None
    bounds_Z: Tensor | None = None


@runtime_checkable
class PreparesInput(Protocol):
    """A linear layer that makes the input of its product itself: `forward(*args)` is `project(prepare(*args))`."""

    def prepare(self, *args: Tensor) -> Tensor:
        """The input of the product: a norm, an activation."""
        ...

    def project(self, x: Tensor) -> Tensor:
        """The product."""
        ...


def base_of_adapters(layer: nn.Module) -> nn.Module:
    """The layer inside an adapter, or nested adapters, as their `base_layer`; any other module itself."""
    while (base := dict(layer.named_children()).get("base_layer")) is not None:
        layer = base
    return layer


def check_adapter(layer: nn.Module, where: str) -> None:
    """Raises UserError for an adapter around a layer that prepares its input: the adapter would get the unprepared input."""
    if layer is not (base := base_of_adapters(layer)) and isinstance(base, PreparesInput):
        raise UserError(
            f"{where}: an adapter holds a {type(base).__name__}, which prepares its input; the adapter would get the unprepared input: "
            "adapt other layers"
        )


@dataclass(frozen=True)
class BlockParts:
    """The part of a model's plan that a block knows: its regions and MLPs, and the dim along which it attends."""

    regions: Mapping[str, Region] = field(default_factory=dict)
    chunks: tuple[Chunked, ...] = ()
    draws: bool = True
    attends: Attended = "columns"


@runtime_checkable
class DeclaresParts(Protocol):
    """A block of a model with a plan."""

    block_parts: BlockParts


def declare_plan(model: nn.Module, plan: ModelPlan) -> None:
    """Set a plan on a model, and its part on each block, in place. Raises UserError for blocks that the model lacks."""
    names = [name for name, _ in model.named_modules()]
    for block in plan.blocks:
        if block.name not in names:
            raise UserError(f"plan: {type(model).__name__} has no block {block.name!r}{nearest(block.name, names)}")
        parts = BlockParts(plan.regions, plan.chunks, plan.draws, block.attends)
        vars(model.get_submodule(block.name))["block_parts"] = parts
    vars(model)["plan"] = plan


def parts_of(block: nn.Module) -> BlockParts:
    """The regions and MLPs of a block; none for a block whose model has no plan."""
    return block.block_parts if isinstance(block, DeclaresParts) else BlockParts()


def named_like(name: str, pattern: str) -> bool:
    """True for a module's name that matches a plan's pattern: `*` stands for one whole or partial name between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    if not name or not pattern:  # the model itself, which no `*` stands for
        return name == pattern
    return len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


def modules_like(module: nn.Module, pattern: str, where: str, optional: bool = False) -> list[tuple[str, nn.Module]]:
    """The modules within a module, itself included, whose names match a pattern; at least one, unless they are `optional`.

    Raises UserError with the nearest names where there is none; `where` is the place in the plan.
    """
    matches = _matches(module, pattern)
    if not matches and not optional:
        hint = nearest(pattern, [name for name, _ in module.named_modules()])
        raise UserError(f"{where}: {type(module).__name__} has no module {pattern!r}{hint}")
    return matches


def _matches(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose names match, each once; descends only where the pattern leads, as plans are looked up often."""
    matches = {"": module}
    for wanted in pattern.split(".") if pattern else ():
        matches = {
            f"{name}.{child}" if name else child: part
            for name, parent in matches.items()
            for child, part in parent.named_children()
            if fnmatchcase(child, wanted)
        }
    names: dict[nn.Module, str] = {}
    for name, part in matches.items():
        names.setdefault(part, name)
    return [(name, part) for part, name in names.items()]


def plan_of(model: nn.Module) -> ModelPlan | None:
    """The plan that a model declares; None where it declares none."""
    plan = model.plan if isinstance(model, DeclaresPlan) else None
    return plan if isinstance(plan, ModelPlan) else None  # a model may have something else of this name


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model by name, in the order of their calls: those of its plan, else of its attribute `blocks`; else none."""
    plan = plan_of(model)
    if plan is not None:
        return [(block.name, model.get_submodule(block.name)) for block in plan.blocks]
    listed = dict(model.named_children()).get("blocks")
    return [(f"blocks.{name}", block) for name, block in listed.named_children()] if listed is not None else []


def single_blocks(model: nn.Module) -> list[int]:
    """The places, in the order of calls, of blocks that are no entries of a list, but modules of other modules."""
    owners = [model.get_submodule(name.rpartition(".")[0]) for name, _ in blocks_of(model)]
    return [
        place
        for place, owner in enumerate(owners)
        if not isinstance(owner, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    ]


def keep_blocks(model: nn.Module, places: Sequence[int]) -> None:
    """Remove all but some blocks of a model, by their places in the order of calls, in place; its plan changes with them.

    Blocks of one list stay in their order. A block that is in no list (`single_blocks`) stays. Raises ValueError where a list of blocks
    would be left empty.
    """
    blocks, plan = blocks_of(model), plan_of(model)
    places_by_list: dict[str, list[int]] = {}
    singles = single_blocks(model)
    for place in sorted({*places, *singles}):
        places_by_list.setdefault(blocks[place][0].rpartition(".")[0], []).append(place)
    left = {name.rpartition(".")[0] for name, _ in blocks} - places_by_list.keys()
    if left:
        raise ValueError(f"{type(model).__name__}: no block of {', '.join(sorted(left))} would be left")
    renamed: dict[str, str] = {}  # the blocks that stay
    for name, own in places_by_list.items():
        if own[0] in singles:
            renamed |= {blocks[place][0]: blocks[place][0] for place in own}
            continue
        renamed |= {blocks[place][0]: f"{name}.{number}" for number, place in enumerate(own)}
    gone = [name for name, _ in blocks if name not in renamed]
    kept = None if plan is None else kept_plan(model, plan, gone, renamed)
    for name, own in places_by_list.items():
        if own[0] not in singles:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, nn.ModuleList(blocks[place][1] for place in own))
    if kept is not None:
        declare_plan(model, kept)


def is_within(name: str, modules: Collection[str]) -> bool:
    """True for the name of one of these modules, or of what is in one."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def kept_plan(
    model: nn.Module, plan: ModelPlan, gone: Collection[str], renamed: Mapping[str, str] | None = None
) -> ModelPlan:
    """A model's plan without what it says of some modules, blocks among them, and of modules within; patterns become names.

    renamed: the new names of blocks that stay.
    """

    def new(name: str) -> str:
        old = next((block for block in renamed or () if is_within(name, (block,))), "")
        return renamed[old] + name.removeprefix(old) if renamed and old else name

    def entries(old: Mapping[str, T]) -> dict[str, T]:
        matches = ((name, entry) for pattern, entry in old.items() for name, _ in _matches(model, pattern))
        return {new(name): entry for name, entry in matches if not is_within(name, gone)}

    def names(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(entries(dict.fromkeys(old)))

    inputs: dict[str, dict[str, Split | Leading | Seen]] = {}
    for pattern, arguments in plan.inputs.items():
        for name, _ in _matches(model, pattern):
            if not is_within(name, gone):
                inputs.setdefault(new(name), {}).update(arguments)
    return replace(
        plan,
        blocks=tuple(replace(block, name=new(block.name)) for block in plan.blocks if not is_within(block.name, gone)),
        inputs=inputs,
        outputs=entries(plan.outputs),
        attention=entries(plan.attention),
        linears=entries(plan.linears),
        divided=entries(plan.divided),
        experts=entries(plan.experts),
        channel_norms=names(plan.channel_norms),
        mlps=names(plan.mlps),
        before=names(plan.before),
        after=names(plan.after),
        cuts=None if plan.cuts is None else names(plan.cuts),
        embeds=names(plan.embeds),
    )
