"""What the reader of a run can do next: the command that samples it, or what makes its first checkpoint."""

from __future__ import annotations

from pathlib import Path

from mmspeed.config import Config, RunConfig
from mmspeed.config.language import LanguageConfig

# options of a run whose model is always given frames, by the first mode
GIVEN = {"first": " --image FILE", "first_last": " --image FILE --last-image FILE", "prefix": " --video FILE"}


def advised(run: Path, config: RunConfig) -> list[str]:
    """The command that samples a run, with the options that it needs; empty for a run that it would refuse."""
    words = f'sample {run} --prompt "..."'
    if isinstance(config, LanguageConfig):
        chat = " --chat" * any(source.content == "chat" for source in config.texts.sources)
        return [] if refusals(config) else [words + chat]
    if not isinstance(config, Config):
        return []
    modes = config.conditioning.shares
    control = " --control FILE" * ("control" in config.data.roles)
    return [words + ("" if "none" in modes else GIVEN.get(next(iter(modes)), GIVEN["first"])) + control]


def refusals(config: RunConfig) -> list[str]:
    """A line for a language model that can be neither sampled nor exported."""
    if not isinstance(config, LanguageConfig):
        return []
    from mmspeed.pipelines.domains.language.domain import LanguageDomain

    return LanguageDomain(config).warnings()


def first_checkpoint(run: Path, config: RunConfig) -> str:
    """A sentence for a run without a checkpoint: which file or signal makes one."""
    return (
        f"{run} has no checkpoint yet, so there is nothing to sample. While it trains, a file {run / 'save'} makes one after the step "
        f"under way; SIGTERM, SIGUSR1, Ctrl-C or a file {run / 'stop'} make one and end the run. Without them step "
        f"{min(config.checkpoint.every, config.train.steps)} is the first that is saved (checkpoint.every)."
    )
