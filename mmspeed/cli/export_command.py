"""`mmspeed export`: a run's weights as a repository of diffusers or a folder of transformers, and adapters as files beside their base."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspeed import log
from mmspeed.config.places import require_run
from mmspeed.errors import UserError

from . import completion, spoken
from .sample_command import RunFolder, Weights

if TYPE_CHECKING:
    from mmspeed.pipelines.inference.export import ExportedRepository
    from mmspeed.pipelines.inference.export_adapter import ExportedAdapter
    from mmspeed.pipelines.inference.language import ExportedFolder

SHARD_SIZE = "5GB"


class Precision(str, Enum):
    """The number type of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class AdapterFormat(str, Enum):
    """The form of exported adapters."""

    diffusers = "diffusers"
    peft = "peft"
    original = "original"
    merged = "merged"


class OtherComponents(str, Enum):
    """The treatment of the base's codec, text encoders and scheduler."""

    link = "link"
    copy = "copy"
    none = "none"


def export(
    run_folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New folder.")],
    format: Annotated[
        AdapterFormat | None,
        typer.Option(
            help="Of runs with model.adapter: a file for load_lora_weights of diffusers, such a file under the authors' names (original), a "
            "folder of peft, or the whole model with the adapter merged. Default: diffusers where the official pipeline loads adapters, else peft."
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(metavar="STEP|best|latest", help="Checkpoint to export.", autocompletion=completion.checkpoints),
    ] = "latest",
    weights: Annotated[Weights, typer.Option(help="The moving average of the weights, or the weights.")] = Weights.ema,
    dtype: Annotated[
        Precision, typer.Option(help="Number type of the weights; what the class keeps in float32 stays so.")
    ] = Precision.float32,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file, such as 5GB.")] = SHARD_SIZE,
    others: Annotated[
        OtherComponents,
        typer.Option(help="Link or copy the codec, text encoders and scheduler of the base, or leave them out."),
    ] = OtherComponents.link,
) -> None:
    """Write a trained model, or an adapter, as a folder that other libraries load: diffusers, transformers for language models, peft."""
    spoken.begin("export", run_folder)
    require_run(run_folder)
    with spoken.loading():
        import torch

        from mmspeed.config.memory import parse_bytes
        from mmspeed.pipelines.inference.export import export_run
        from mmspeed.pipelines.inference.export_adapter import export_adapter
        from mmspeed.pipelines.inference.language import export_language_run
        from mmspeed.pipelines.run.run_folder import RunFolder as Folder

    try:
        shard_bytes = parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    folder = Folder.open(run_folder)
    language, adapted = folder.task() == "language", format is not None or folder.run_config().adapter is not None
    if language and others is not OtherComponents.link:
        raise UserError("--others is of models of diffusers: leave it out for a language model")
    if (
        adapted
        and format is not AdapterFormat.merged
        and (others is not OtherComponents.link or shard_size != SHARD_SIZE)
    ):
        raise UserError("--others and --shard-size are of whole models: leave them out, or use --format merged")
    options: dict[str, Any] = {"checkpoint": checkpoint, "weights": weights.value, "dtype": getattr(torch, dtype.value)}
    options |= {"shard_bytes": shard_bytes} | ({} if language else {"others": others.value})
    with log.Working("exporting", tell=False):
        if adapted:
            line = _of_adapter(
                export_adapter(run_folder, out, format=None if format is None else format.value, **options)
            )
        elif language:
            line = _of_decoder(export_language_run(run_folder, out, **options))
        else:
            line = _of_repository(export_run(run_folder, out, **options), others)
    print(line)


def _of_adapter(written: ExportedAdapter) -> str:
    """What is printed of an exported adapter."""
    return (
        f"{written.folder}: adapters of {written.layers} layers of {written.checkpoint} ({written.weights}), {written.format}, "
        f"{log.format_bytes(written.bytes)}; load with {written.loading}"
    )


def _of_decoder(written: ExportedFolder) -> str:
    """What is printed of an exported language model."""
    return (
        f"{written.folder}: {written.tensors} tensors of {written.checkpoint} ({written.weights}), {log.format_bytes(written.bytes)}; "
        "AutoModelForCausalLM of transformers loads it"
    )


def _of_repository(written: ExportedRepository, others: OtherComponents) -> str:
    """What is printed of an exported repository."""
    line = (
        f"{written.folder}: {', '.join(written.components)} of {written.checkpoint} ({written.weights}), {written.tensors} tensors, "
        f"{log.format_bytes(written.bytes)}"
    )
    if not written.others:
        return line
    return f"{line}\n{'linked to' if others is OtherComponents.link else 'copied from'} the base: {', '.join(written.others)}"
