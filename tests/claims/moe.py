"""Experts beside transformers' own: a layer, a step of training, and experts spread over two processes. Ratios in one run, medians.

Both sides of a ratio have the same weights and the same tokens, and take turns. On one process times are processor seconds of one thread;
between processes they are wall seconds of the first one, behind a barrier, with processor seconds beside. A row is a function of `ROWS`.

Legend: T tokens, E width, G experts, K experts of a token, B N packs and their tokens.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.log import setup
from mmspeed.loop.expert_balance import mover
from mmspeed.models.language.decoder import next_tokens
from mmspeed.models.language.experts import Experts
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.models.weights import quiet
from mmspeed.moe.balance import first_places, plan_shares, rearrange, slots
from mmspeed.moe.copies import Lending
from mmspeed.parallel import parallelize
from mmspeed.parallel.experts import spread_experts, spread_modules
from mmspeed.parallel.tensor import local
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess import TextCacheBuilder
from mmspeed.protocols.plan import ModelPlan, declare_plan
from tests.support.added_model import Meshes
from tests.support.language_models import loaded
from tests.support.spawn import run_ranks

from .language import VOCABULARY, LanguageSetting, language_claim_config, save_experts, train_by_trainer
from .turns import Pace, in_turns

OURS, TRAINER, EXCHANGED = "mmspeed", "Trainer", "AllToAllEP"
IMPLEMENTATIONS = ("grouped_mm", "eager")  # of transformers' experts; the first is its default
WARM = 2  # rounds that are not counted
GOAL = 1.05

Side = tuple[nn.Module, Callable[[], Tensor]]  # a module and its loss
Measured = dict[
    str, list[tuple[float, float, float]]
]  # by side: wall seconds, processor seconds and loss of each round


@dataclass(frozen=True)
class MoeSetting:
    """Sizes of layers and of the measurement; `seeds`: of weights and tokens, each with `rounds`."""

    rounds: int = 9
    seeds: int = 3
    experts: tuple[int, ...] = (8, 64, 128)
    tokens: int = 1024
    width: int = 256
    hidden: int = 128
    top_k: int = 4


@dataclass(frozen=True)
class Row:
    """Seconds of both sides in turns; `goal`: the greatest ratio."""

    name: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    gap: float  # the greatest relative difference of two losses
    goal: float = 1.0

    @property
    def ratio(self) -> float:
        """Our time over the other's: the median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    def line(self) -> str:
        """The figures in words."""
        ours, theirs = (1000 * statistics.median(side) for side in (self.ours, self.theirs))
        return (
            f"{self.name}: {ours:.1f} ms, {theirs:.1f} ms, ratio {self.ratio:.3f}{'' if self.ratio <= self.goal else ' (worse)'}; "
            f"losses differ by {self.gap:.1e}"
        )


def in_rounds(sides: Mapping[str, Side], rounds: int, meet: Callable[[], None] = lambda: None) -> Measured:
    """Forward and backward of the sides, whose order turns round by round; `meet` is called before each."""
    told: Measured = {name: [] for name in sides}
    for number in range(WARM + rounds):
        for name in [*sides][:: 1 if number % 2 else -1]:
            module, loss_of = sides[name]
            module.zero_grad()
            meet()
            wall, processor = time.perf_counter(), time.process_time()
            loss = loss_of()
            loss.backward()
            if number >= WARM:
                told[name].append((time.perf_counter() - wall, time.process_time() - processor, float(loss.detach())))
    return told


def row_of(name: str, told: list[Measured], peer: str, column: int, goal: float = 1.0) -> Row:
    """A row of what several seeds told."""
    ours, theirs = ([each for one in told for each in one[side]] for side in (OURS, peer))
    gap = max(abs(a[2] - b[2]) / abs(b[2]) for a, b in zip(ours, theirs, strict=True))
    return Row(name, tuple(each[column] for each in ours), tuple(each[column] for each in theirs), gap, goal)


# -- a layer ----------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The experts of a Qwen3-MoE by themselves."""

    def __init__(self, experts: int, seed: int, setting: MoeSetting) -> None:
        super().__init__()
        twin = tiny_twin(SHAPES["qwen3-30b-a3b"].settings).experts
        assert twin is not None
        self.experts = Experts(setting.width, replace(twin, num_experts=experts, moe_intermediate_size=setting.hidden))
        for name, p in self.named_parameters():
            p.data.copy_(rng.normal(p.shape, seed, name) * p.shape[-1] ** -0.5)
        declare_plan(self, ModelPlan(blocks=(), experts={"experts": {}}))


def transformers_experts(ours: Experts, implementation: str, part: slice = slice(None)) -> Any:
    """transformers' experts with (a part of) the weights of ours."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, width, hidden = ours.down_proj.shape
    config: Any = Qwen3MoeConfig(num_experts=experts, hidden_size=width, moe_intermediate_size=hidden)
    config._experts_implementation = implementation
    theirs = Qwen3MoeExperts(config)
    for name, p in ours.named_parameters():
        theirs.register_parameter(name, nn.Parameter(p.detach()[part].clone()))
    theirs.num_experts = len(theirs.down_proj)
    return theirs


def tokens_for(experts: int, seed: int, setting: MoeSetting, *place: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x_TE, weights_TK, expert_TK): tokens whose choices are even, beside chance."""
    x_TE = rng.normal((setting.tokens, setting.width), seed, "tokens", *place)
    scores_TG = rng.normal((setting.tokens, experts), seed, "scores", *place).softmax(-1)
    return (x_TE, *scores_TG.topk(min(setting.top_k, experts)))


def loss_of(call: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A loss whose gradient reaches tokens and gates."""
    x_TE, weights_TK, expert_TK = tokens
    return call(x_TE.clone().requires_grad_(), weights_TK.clone().requires_grad_(), expert_TK).square().mean()


def layer_rows(folder: Path, setting: MoeSetting) -> Iterator[Row]:
    """A layer on one process, forward and backward."""
    for experts in setting.experts:
        told = [in_rounds(_layers(experts, seed, setting), setting.rounds) for seed in range(setting.seeds)]
        for implementation in IMPLEMENTATIONS:
            yield row_of(f"layer of {experts} experts beside transformers' {implementation}", told, implementation, 1)


def _layers(experts: int, seed: int, setting: MoeSetting) -> dict[str, Side]:
    """A layer of ours and of transformers in each way."""
    ours, tokens = Layer(experts, seed, setting).experts, tokens_for(experts, seed, setting)

    def side(theirs: Any) -> Side:
        return theirs, lambda: loss_of(lambda x, w, e: theirs(x, e, w), tokens)

    return {
        OURS: (ours, lambda: loss_of(ours, tokens)),
        **{each: side(transformers_experts(ours, each)) for each in IMPLEMENTATIONS},
    }


# -- a step of training -----------------------------------------------------------------------------------------------------


def step_rows(folder: Path, setting: MoeSetting) -> Iterator[Row]:
    """A step of `mmspeed train` beside one of transformers' Trainer, on the same packs: all that happens between two steps."""
    for experts in setting.experts[:2]:
        own = _of_language(experts, setting)
        place = folder / f"step-{experts}"
        shutil.rmtree(place, ignore_errors=True)
        save_experts(place / "base", own)
        config = language_claim_config(place, own)
        TextCacheBuilder(config.texts, config.tokenizer, config.seed).run()
        sides = {OURS: _train, TRAINER: _train_by_trainer}
        told = in_turns(sides, (str(place), experts, asdict(setting)), setting.rounds, WARM)
        yield row_of(f"step of a Qwen3-MoE of {experts} experts beside the Trainer", [told], TRAINER, 1)


def _of_language(experts: int, setting: MoeSetting) -> LanguageSetting:
    return LanguageSetting(steps=WARM + setting.rounds + 2, experts=experts, threads=1)


class _Paced:
    """Takes a step on request, and tells its processor seconds and its loss."""

    def __init__(self, pipe: Connection) -> None:
        self.pace, self.begun = Pace(pipe), time.process_time()

    def step(self, loss: float) -> None:
        self.pace.step(time.process_time() - self.begun, loss)
        self.begun = time.process_time()


def _train(pipe: Connection, folder: str, experts: int, setting: dict[str, Any]) -> None:
    """`mmspeed train`, in a process of its own."""
    torch.set_num_threads(1)
    paced = _Paced(pipe)

    class Told(TrainCallback):
        def on_step(self, event: StepEvent) -> None:
            assert event.loss is not None
            paced.step(event.loss)

    own = _of_language(experts, MoeSetting(**setting))
    TrainPipeline(language_claim_config(Path(folder), own), callbacks=[Told()]).run()


def _train_by_trainer(pipe: Connection, folder: str, experts: int, setting: dict[str, Any]) -> None:
    """transformers' Trainer, in a process of its own."""
    torch.set_num_threads(1)
    paced = _Paced(pipe)
    config = language_claim_config(Path(folder), _of_language(experts, MoeSetting(**setting)))
    train_by_trainer(Path(folder), config, paced.step)


# -- two processes ----------------------------------------------------------------------------------------------------------


def spread_rows(folder: Path, setting: MoeSetting) -> Iterator[Row]:
    """Layers, and a whole model, whose experts lie on two processes: exchanges included, forward and backward."""
    small = LanguageSetting(experts=setting.experts[0], width=64, depth=2)
    shutil.rmtree(folder / "spread", ignore_errors=True)
    save_experts(folder / "spread", small)
    first, _ = run_ranks(_spread, 2, str(folder / "spread"), asdict(setting), timeout=3600.0)
    for name, told in first.items():
        for column, what in enumerate(("", ", processor seconds")):
            yield row_of(f"2 processes, {name} beside AllToAllEP{what}", told, EXCHANGED, column, GOAL)


def _spread(folder: str, setting: dict[str, Any]) -> dict[str, list[Measured]]:
    """What each comparison told, on this process."""
    own, meshes = MoeSetting(**setting), Meshes()
    told = {
        f"layer of {experts} experts": [in_rounds(_spread_layers(experts, seed, own, meshes), own.rounds, dist.barrier) for seed in range(own.seeds)]
        for experts in own.experts
    }  # fmt: skip
    models = _spread_models(Path(folder), meshes)
    told["forward and backward of a small Qwen3-MoE"] = [
        in_rounds(models(seed), own.rounds, dist.barrier) for seed in range(own.seeds)
    ]
    return told


def _spread_layers(experts: int, seed: int, setting: MoeSetting, meshes: Meshes) -> dict[str, Side]:
    """A layer spread by us, and by transformers."""
    from transformers.distributed.expert_parallel import AllToAllEP

    mesh, layout = meshes.of(ParallelConfig(ep=2))
    assert mesh.expert is not None
    layer, here = Layer(experts, seed, setting), dist.get_rank() * experts // 2
    theirs = transformers_experts(layer.experts, IMPLEMENTATIONS[0], slice(here, here + experts // 2))
    theirs._is_expert_parallel = True  # as its plan says
    peer = AllToAllEP(theirs, mesh.expert["ep"], mesh.expert["etp"])
    spread_experts(layer, mesh, layout)
    tokens = tokens_for(experts, seed, setting, dist.get_rank())
    return {
        OURS: (layer, lambda: loss_of(layer.experts, tokens)),
        EXCHANGED: (theirs, lambda: loss_of(lambda x, w, e: peer(x, e, w), tokens)),
    }


def _spread_models(folder: Path, meshes: Meshes) -> Callable[[int], dict[str, Side]]:
    """The sides of a seed: a model of a repository, sharded and with spread experts, by us and by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mesh, layout = meshes.of(ParallelConfig(ep=2))
    ours = parallelize(loaded(folder), mesh, "fsdp", layout=layout)
    spread = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    with quiet():
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread)
    theirs.train()

    def sides(seed: int) -> dict[str, Side]:
        ids_BN = (rng.normal((4, 128), seed, "ids", dist.get_rank()).abs() * 1000).long() % VOCABULARY
        targets_BN = next_tokens(ids_BN)
        predicted = ids_BN[:, 1:].numel()
        return {
            OURS: (ours, lambda: ours(ids_BN, target_BN=targets_BN).loss_BN.sum() / predicted),
            EXCHANGED: (theirs, lambda: theirs(input_ids=ids_BN, labels=ids_BN, use_cache=False).loss),
        }

    return sides


# -- levelled loads ---------------------------------------------------------------------------------------------------------

SKEW = 1.0  # of the logarithm of experts' popularity
LEVELLED = {"moved experts": 0, "moved experts and a copy": 1}


def balance_rows(folder: Path, setting: MoeSetting) -> Iterator[Row]:
    """A layer whose experts are asked for unevenly, on two processes: levelled by each feature, beside experts that stay."""
    first, _ = run_ranks(_balance, 2, asdict(setting), timeout=3600.0)
    for name, told in first.items():
        yield row_of(f"2 processes, {name} beside experts that stay", told, "stay", 0)


def _balance(setting: dict[str, Any]) -> dict[str, list[Measured]]:
    own, meshes = MoeSetting(**setting), Meshes()
    return {
        name: [
            in_rounds(_levelled_layers(copies, seed, own, meshes), own.rounds, dist.barrier)
            for seed in range(own.seeds)
        ]
        for name, copies in LEVELLED.items()
    }


def _levelled_layers(copies: int, seed: int, setting: MoeSetting, meshes: Meshes) -> dict[str, Side]:
    mesh, layout = meshes.of(ParallelConfig(ep=2))
    axis, experts = layout.experts, setting.experts[-1]
    popular_G = SKEW * rng.normal((experts,), seed, "popularity")
    noise_TG = rng.normal((setting.tokens, experts), seed, "scores", axis.rank)
    x_TE = rng.normal((setting.tokens, setting.width), seed, "tokens", axis.rank)
    tokens = (x_TE, *(popular_G + noise_TG).softmax(-1).topk(setting.top_k))
    load_G = torch.bincount(tokens[2].flatten(), minlength=experts)
    dist.all_reduce(load_G)
    layers = {name: Layer(experts, seed, setting) for name in (OURS, "stay")}
    for layer in layers.values():
        spread_experts(layer, mesh, layout)
    load_LG, home = load_G[None].numpy(), first_places(1, experts)
    places = rearrange(load_LG, home, axis.size)
    plans = plan_shares(load_LG, places, axis.size, copies)
    module = layers[OURS].experts
    move = mover(home[0], places[0], axis)
    with torch.no_grad():
        for p in module.parameters():
            local(p.detach()).copy_(move(local(p.detach())))
    (spread,) = spread_modules(layers[OURS])
    spread._dispatcher.slots, spread._lending = (
        slots(places, plans, axis.size)[0],
        Lending.of(plans[0], places[0], axis),
    )
    return {name: (layer, partial(loss_of, layer.experts, tokens)) for name, layer in layers.items()}


# -- all rows ---------------------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Path, MoeSetting], Iterator[Row]]] = {
    "layer": layer_rows,
    "step": step_rows,
    "spread": spread_rows,
    "balance": balance_rows,
}


def main() -> int:
    """Measure beside transformers, and print a line for each comparison; 1 where two processes miss their goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.moe", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/moe"), help="made anew")
    parser.add_argument("--only", choices=ROWS, action="append", help="these rows alone")
    for name in ("rounds", "seeds", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(MoeSetting, name))
    chosen = parser.parse_args()
    setup()
    torch.set_num_threads(1)
    setting = MoeSetting(rounds=chosen.rounds, seeds=chosen.seeds, tokens=chosen.tokens)
    passed = True
    for name in chosen.only or ROWS:
        for row in ROWS[name](chosen.output.resolve(), setting):
            print(row.line(), flush=True)
            passed &= row.goal == 1.0 or row.ratio <= row.goal
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
