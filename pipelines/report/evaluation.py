"""`mmspeed evaluate`: what training changed. A run beside its base: held-out loss, and videos of the same prompts and seeds.

The base of a run with adapters is its model without them, of another run the weights that it began from.

<run>/evaluation/step-00001000-ema/
  evaluation.json      a row of kind `evaluation` for base and run, and one for each video
  evaluation.html      the same, with the videos side by side
  base/ run/           the videos
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from mmspeed import comm
from mmspeed.config import Config
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights, materialize, read_weights
from mmspeed.log import ProgressLine, Working, get_logger
from mmspeed.loop.terms import reduce_terms
from mmspeed.mesh import process_group
from mmspeed.models.adapters import disabled
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.sections import opened_of
from mmspeed.pages import data_uri, render
from mmspeed.parallel import autocast
from mmspeed.pipelines.diffusion.experts import OtherExpert
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.inference.agreement import sampling_facts
from mmspeed.pipelines.inference.language import language_config
from mmspeed.pipelines.inference.measures import ClipScore, diversity, flicker, motion
from mmspeed.pipelines.inference.media import check_output
from mmspeed.pipelines.inference.prompts import FILES, VideoRequest
from mmspeed.pipelines.inference.run_models import load_model
from mmspeed.pipelines.inference.text_to_video import SamplerChoice, TextToVideo, find_checkpoint, present_weights
from mmspeed.pipelines.report.scores import scores_of
from mmspeed.pipelines.run.agreement import require_agreement
from mmspeed.pipelines.run.run_folder import RunFolder, write_text
from mmspeed.protocols import InitializesWeights, RunPlace, Validation, source_of

log = get_logger("evaluate")

Subject = Literal["base", "run"]
Layout = Literal["vbench", "fastvideo"]
Row = dict[str, Any]
MEASURES = ("motion", "flicker", "diversity", "clip")
BENCHMARKS = "for benchmarks: mmspeed export {run} -o FOLDER{merged}, then lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag"
NO_PROMPTS = "there are no prompts (validate.prompts, --prompt or --prompts)"
ALWAYS_GIVEN = "the model makes them of given files: name prompts and files in a .jsonl file of --prompts"
NO_BASE = "the run began from random weights: there is no base beside it"
LONGEST_NAME = 255  # bytes of a file's name


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate of a run.

    requests: of videos; None: the config's prompts. seeds: how many for each, from its own seed, or validate.seed, on. steps: of the
    sampler; None: the config's. clip: folder or hub id of CLIP's weights. layout: (whose names videos get, the folder of their folders);
    None: in the run's folder. scores: commands that print JSON about a folder of videos.
    """

    run: Path
    checkpoint: str = "latest"
    weights: Literal["ema", "model"] = "ema"
    device: str = "auto"
    requests: tuple[VideoRequest, ...] | None = None
    seeds: int = 2
    steps: int | None = None
    clip: str | None = None
    layout: tuple[Layout, Path] | None = None
    scores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """The results: a row for base and run, a row for each video, where they are, and what is missing and why."""

    folder: Path
    videos_folder: Path
    facts: Row
    rows: list[Row]
    videos: list[Row]
    notes: list[str]

    def write(self) -> list[Path]:
        """Write evaluation.json and evaluation.html, which are the same at each call, and return their paths."""
        table, page = self.folder / "evaluation.json", self.folder / "evaluation.html"
        whole = {**self.facts, "notes": self.notes, "rows": self.rows, "videos": self.videos}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(table, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
        write_text(page, self._page())
        return [table, page]

    def table(self) -> list[tuple[str, ...]]:
        """(measure, base, run, difference), or without a base (measure, run), the head first."""
        columns = [_numbers(row) for row in self.rows]
        names = dict.fromkeys(name for column in columns for name in column)
        head = ("measure", *(row["of"] for row in self.rows), *(["difference"] if len(columns) == 2 else []))
        return [head, *((name, *_cells([column.get(name) for column in columns])) for name in names)]

    def _page(self) -> str:
        subjects = [row["of"] for row in self.rows]
        shown = [
            (
                f"{one['prompt']} (seed {one['seed']})",
                [
                    (of, data_uri((self.videos_folder / one[of]["file"]).read_bytes(), _kind(one[of]["file"])))
                    for of in subjects
                ],
            )
            for one in self.videos
        ]
        head, *rows = self.table()
        return render(
            "evaluation.html",
            title=f"{self.facts['run']}, evaluated - mmspeed",
            name=self.facts["run"],
            checkpoint=self.facts["checkpoint"],
            weights=self.facts["weights"],
            head=head,
            rows=rows,
            notes=self.notes,
            videos=shown,
        )


def evaluate_run(job: EvaluationJob) -> Evaluation | None:
    """Evaluate a run of the video or the language task, in the processes of a launcher together; the result on rank 0, None on the others.

    Raises UserError for a run or checkpoint that is missing, data that are not there any more, and prompts that cannot be sampled.
    """
    folder = RunFolder.open(job.run)
    device = pick(job.device)
    device.activate()
    if folder.task() == "language":
        return _evaluate_language(job, folder, device)
    result = _evaluate_videos(job, folder, device)
    if result is None:
        return None
    device.empty_cache()  # commands may need the memory of the models, which are gone
    for row in result.rows if result.videos else ():
        for command in job.scores:
            with Working(f"scoring the {row['of']}: {command}"):
                row.setdefault("scores", {}).update(scores_of(command, result.videos_folder / row["of"]))
    return result


def _evaluate_videos(job: EvaluationJob, folder: RunFolder, device: Device) -> Evaluation | None:
    """The losses and videos of a run and of its base, without the commands' scores."""
    with process_group(device):
        rank, world = dist.get_rank(), dist.get_world_size()
        place = RunPlace(device, rank, world, groups=world, group=rank, folder=folder.root, resumed=True)
        with Working("loading the run", tell=False):
            pipe = TextToVideo.from_run(folder.root, job.checkpoint, job.weights, job.device)
            clip = None if job.clip is None else ClipScore(job.clip, device)
        config, notes = pipe.config, list[str]()
        weights = present_weights(config, job.weights)
        requests = _requests(job, config)
        choice = SamplerChoice(steps=job.steps)
        sizes = pipe.sizes(requests)
        if world > 1:
            require_agreement(
                sampling_facts(pipe, requests, choice), "give all of them the same command, run folder and software"
            )
        place_of_results = folder.root / "evaluation" / f"{pipe.checkpoint}-{weights}"
        layout, videos_folder = job.layout or (None, place_of_results)
        names = _names(requests, job.seeds, [size.is_image for size in sizes], layout)
        comm.first_does(lambda: _prepare(videos_folder, names, layout), rank)
        domain, validation = _validation(config, place)
        if validation is None:
            notes.append("no held-out samples (data.val_fraction, or a split column): no held-out loss")
        if not requests:
            always = pipe.predictor.conditioning.always
            notes.append(f"no videos: {ALWAYS_GIVEN if always else NO_PROMPTS}")
        rows, videos = [], dict[int, Row]()
        for of in ("base", "run"):
            with _subject(of, pipe, folder, config, device) as subject:
                if subject is None:
                    notes.append(NO_BASE)
                    continue
                row: Row = {"kind": "evaluation", "step": step_of(str(pipe.checkpoint)), "of": of}
                if validation is not None:
                    with Working(f"held-out loss of the {of}", tell=False):
                        models = _models(domain, subject)
                        row |= validation.row(reduce_terms(validation.measure(models), validation.divisors()))
                mine = _sample(of, subject, requests, names, choice, videos_folder, clip, place)
                everyone = comm.all_gather_objects(list(mine.items()))  # JSON has no numbers as keys
                made: dict[int, Row] = {index: one for several in everyone for index, one in several}
                row |= _means(made)
                rows.append(row)
                for index in sorted(made):
                    one = videos.setdefault(index, {"kind": "video", **_said(requests[index])})
                    one[of] = {name: value for name, value in made[index].items() if name != "diversity"}
        if rank != 0:
            return None
    facts = {
        "run": config.name,
        "checkpoint": pipe.checkpoint,
        "weights": weights,
        "seeds": job.seeds,
        "prompts": list(dict.fromkeys(request.prompt for request in requests)),
    }
    return Evaluation(place_of_results, videos_folder, facts, rows, list(videos.values()), notes)


def _evaluate_language(job: EvaluationJob, folder: RunFolder, device: Device) -> Evaluation | None:
    """The held-out losses of a language model and of its base. Raises UserError for options of videos."""
    from mmspeed.loop.checkpoint.load import load_start
    from mmspeed.loop.checkpoint.manager import load_weights

    if any(one is not None for one in (job.requests, job.layout, job.clip, job.steps)) or job.scores:
        raise UserError(
            "--prompt, --prompts, --steps, --clip, --layout and --score are of videos, and "
            f"{job.run} is a run of a language model"
        )
    config = language_config(folder)
    weights, checkpoint = present_weights(config, job.weights), find_checkpoint(folder, job.checkpoint)
    merged = "" if config.model.adapter is None else " --format merged"
    notes = [BENCHMARKS.format(run=job.run, merged=merged)]
    rows: list[Row] = []
    with process_group(device):
        rank, world = dist.get_rank(), dist.get_world_size()
        place = RunPlace(device, rank, world, groups=world, group=rank, folder=folder.root, resumed=True)
        domain = LanguageDomain(config)
        with Working("opening the data", tell=False):
            domain.open(place)
            validation = domain.validation({}, domain.data(place), place)
        if validation is None:
            raise UserError(f"{job.run} holds no documents out: there is no loss to compare")
        with Working("loading the run", tell=False):
            model = domain.build()["model"]
            materialize(model, device.torch_device)
            source, start = source_of(model), config.train.start_from
            if source is not None:
                read_weights(model, source)
            elif start is not None:
                load_start(start, model)
        if config.device.dtype != "float32":
            autocast(model, parse_dtype(config.device.dtype))
        adapted = config.model.adapter is not None
        if not adapted and source is None and start is None:
            notes.append(NO_BASE)
        elif not adapted:
            if source is not None and start is not None:
                load_start(start, model)
            rows.append(_language_row("base", checkpoint, validation, model))
        load_weights(checkpoint, model, weights)
        if adapted:
            with disabled(model):
                rows.append(_language_row("base", checkpoint, validation, model))
        rows.append(_language_row("run", checkpoint, validation, model))
        if rank != 0:
            return None
    place_of_results = folder.root / "evaluation" / f"{checkpoint.name}-{weights}"
    facts = {"run": config.name, "checkpoint": checkpoint.name, "weights": weights}
    return Evaluation(place_of_results, place_of_results, facts, rows, [], notes)


def _language_row(of: Subject, checkpoint: Path, validation: Validation, model: nn.Module) -> Row:
    """A row of the held-out loss of a language model."""
    with Working(f"held-out loss of the {of}", tell=False):
        values = reduce_terms(validation.measure({"model": model}), validation.divisors())
    return {"kind": "evaluation", "step": step_of(checkpoint.name), "of": of, **validation.row(values)}


def _requests(job: EvaluationJob, config: Config) -> list[VideoRequest]:
    """The videos to sample: what is asked for, or the config's prompts, each with all its seeds."""
    given = job.requests
    if given is None:
        given = tuple(VideoRequest(prompt) for prompt in dict.fromkeys(config.validate_.prompts))
    firsts = [config.validate_.seed if each.seed is None else each.seed for each in given]
    return [
        replace(each, seed=first + more) for each, first in zip(given, firsts, strict=True) for more in range(job.seeds)
    ]


def _said(request: VideoRequest) -> Row:
    """A request's prompt, seed and files."""
    files = {name: getattr(request, name) for name in FILES if getattr(request, name) is not None}
    return {"prompt": request.prompt, "seed": request.seed, **files}


def _names(requests: Sequence[VideoRequest], seeds: int, images: Sequence[bool], layout: Layout | None) -> list[str]:
    """The files of videos, below the folder of base or run. Raises UserError for a prompt that is no file's name, or another's."""
    names, counts, prompts = [], dict[str, int](), dict[str, str]()
    for index, (request, image) in enumerate(zip(requests, images, strict=True)):
        stem = f"{index // seeds:03d}" if layout is None else STEMS[layout](request.prompt)
        number = counts[stem] = counts.get(stem, -1) + 1
        name = f"{stem}-{number}.{'png' if image else 'mp4'}"
        if "/" in name or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise UserError(f"--layout {layout}: no file can be named by the prompt {request.prompt!r}")
        if prompts.setdefault(stem, request.prompt) != request.prompt and layout is not None:
            raise UserError(
                f"--layout {layout}: {prompts[stem]!r} and {request.prompt!r} name one file: leave one of them out"
            )
        names.append(name)
    return names


def _fastvideo_stem(prompt: str) -> str:
    """A prompt as `sanitize_prompt` of FastVideo writes it."""
    kept = re.sub(r'[\\/:*?"<>|]', "", prompt[:100]).strip().strip(".")
    return re.sub(r"\s+", " ", kept) or "output"


STEMS: dict[Layout, Callable[[str], str]] = {"vbench": str, "fastvideo": _fastvideo_stem}  # of a video's name


def _prepare(folder: Path, names: Sequence[str], layout: Layout | None) -> None:
    """Remove the videos of an evaluation before. Raises UserError for a user's folder that holds others, which would be scored too."""
    for of in ("base", "run"):
        if layout is None:
            shutil.rmtree(folder / of, ignore_errors=True)
        elif (folder / of).is_dir() and (others := {path.name for path in (folder / of).iterdir()} - set(names)):
            raise UserError(f"--layout: {folder / of} holds other files, such as {min(others)!r}: name another folder")
        for name in names[:1]:
            check_output(folder / of / name, 1)


def _validation(config: Config, place: RunPlace) -> tuple[VideoDomain, Validation | None]:
    """The run's domain with its data open, and its held-out loss; None where nothing is held out. A collective call."""
    only_loss = config.validate_.model_copy(update={"prompts": (), "clips": 0})
    domain = VideoDomain(config.model_copy(update={"validate_": only_loss}))
    if not only_loss.samples:
        return domain, None
    with Working("opening the data", tell=False):
        domain.open(place)
        return domain, domain.validation({}, domain.data(place), place)


def _models(domain: VideoDomain, pipe: TextToVideo) -> dict[str, nn.Module]:
    """The models by role, as the domain names them."""
    if domain.experts is None or pipe.other is None:
        return {"model": pipe.model}
    return {domain.experts.roles["high"]: pipe.model, domain.experts.roles["low"]: pipe.other.model}


@contextmanager
def _subject(
    of: str, pipe: TextToVideo, folder: RunFolder, config: Config, device: Device
) -> Iterator[TextToVideo | None]:
    """The pipeline of a run or of its base, inside; None for a run that began from random weights."""
    if of == "run":
        yield pipe
    elif config.adapter is not None:
        with ExitStack() as stack:
            for model in (pipe.model, *(() if pipe.other is None else (pipe.other.model,))):
                stack.enter_context(disabled(model))
            yield pipe
    else:
        yield _base_of(pipe, folder, config, device)


def _base_of(pipe: TextToVideo, folder: RunFolder, config: Config, device: Device) -> TextToVideo | None:
    """The pipeline with the weights that a run without adapters began from; None where they were drawn."""
    from mmspeed.loop.checkpoint.load import learned, load_start, starting_checkpoint

    start, section, info = config.train.start_from, config.model, folder.info()
    opened = opened_of(section)
    if start is None and opened is None:
        return None

    def load(model_section: Any, role: str | None) -> nn.Module:
        sizes = info["latent_channels"], info["text_width"]
        model = load_model(config, model_section, sizes, None, "model", device, role, opened)
        if source_of(model) is None:
            assert isinstance(model, InitializesWeights)
            init_weights(model, config.seed)
        if start is not None and (role is None or learned(starting_checkpoint(start), role)):
            load_start(start, model, None, role)
        return model

    with Working("loading the base", tell=False):
        other = pipe.other
        if other is not None and (low := getattr(section, "second_subfolder", None)) is not None:
            own = section.model_copy(update={"subfolder": low, "second_subfolder": None})
            other = OtherExpert(load(own, low), other.boundary, other.noise)
        weights = folder.codec_weights if config.vae.kind == "linear" else None
        return TextToVideo(
            config, load(section, None), load_codec(config.vae, device, weights), device, None, other, opened
        )


def _sample(
    of: str,
    pipe: TextToVideo,
    requests: Sequence[VideoRequest],
    names: Sequence[str],
    choice: SamplerChoice,
    folder: Path,
    clip: ClipScore | None,
    place: RunPlace,
) -> dict[int, Row]:
    """Sample and save this rank's videos, all of a prompt on one rank; the measures of each by its number among the requests."""
    prompts = list(dict.fromkeys(request.prompt for request in requests))
    own = set(prompts[place.rank :: place.world])
    mine = [index for index, request in enumerate(requests) if request.prompt in own]
    rows: dict[int, Row] = {}
    frames: dict[VideoRequest, list[Any]] = {}  # of videos that differ by their seeds alone
    if not mine:
        return rows
    total = (choice.steps or pipe.config.sample.steps or 0) * len(mine)
    with ProgressLine(f"sample {of}", total, "step") as line:
        made = pipe.sample(
            [requests[index] for index in mine], choice, lambda done, _: line.advance(done - line.done), together=1
        )
        for index, (request, video) in zip(mine, made, strict=True):
            path = folder / of / names[index]
            video.save(path)
            pixels = video.frames_FHWC
            frames.setdefault(replace(request, seed=None), []).append(pixels)
            rows[index] = {"file": f"{of}/{names[index]}", "motion": motion(pixels), "flicker": flicker(pixels)}
            if clip is not None:
                rows[index]["clip"] = clip(request.prompt, pixels)
    for index in mine:
        rows[index]["diversity"] = diversity(frames[replace(requests[index], seed=None)])
    return rows


def _means(videos: Mapping[int, Row]) -> Row:
    """The means of the measures over videos, in their order; without those that no video has."""
    means = {}
    for name in MEASURES:
        values = [videos[index][name] for index in sorted(videos) if videos[index].get(name) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means


def step_of(checkpoint: str) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.rpartition("-")[2])


def _numbers(row: Row) -> dict[str, float]:
    """The numbers of a row by their names in the table."""
    quantiles = row.get("by_quantile", [])
    named = {"held-out loss": row.get("loss"), "perplexity": row.get("perplexity")}
    named |= {
        f"held-out loss, {q / len(quantiles):.0%} to {(q + 1) / len(quantiles):.0%} of the times": value
        for q, value in enumerate(quantiles)
    }
    named |= {"CLIP score" if name == "clip" else name: row.get(name) for name in MEASURES} | row.get("scores", {})
    return {name: value for name, value in named.items() if value is not None}


def _cells(values: Sequence[float | None]) -> list[str]:
    """Numbers of base and run, and their difference."""
    cells = ["none" if value is None else f"{value:.6g}" for value in values]
    if len(values) < 2:
        return cells
    base, run = values
    return [*cells, "none" if base is None or run is None else f"{run - base:+.3g}"]


def _kind(name: str) -> str:
    return "image/png" if name.endswith(".png") else "video/mp4"
