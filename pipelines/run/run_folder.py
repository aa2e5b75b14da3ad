"""The folder of a run: its files, which make it usable without its training cache.

runs/my-run/
  config.yaml          the whole resolved config
  run.json             facts for sampling: latent channels, strides, text width, encoder fingerprints; each checkpoint holds them, too
  codec.safetensors    the linear codec's weights (only with `vae: {kind: linear}`)
  metrics.jsonl        a row of means every `train.log_every` steps, one for each validation
  metrics.odd          lines of metrics.jsonl that no run writes, if any were found
  memory.json          the ways that were chosen under `memory.budget`, what was expected and what was measured
  pipeline.json        when the passes of the last logged step of a pipeline began and ended, and the orders of its pairs' nodes
  prompts.safetensors  the encoded validation prompts
  checkpoints/         loop/checkpoint/manager.py
  trackers.json        the id of the run at its trackers, with which a resumed run goes on
  trackers/            files of trackers, such as TensorBoard's
  samples/             videos sampled during training
  report.html          written at each validation, and by `mmspeed report`
  attempt.json         the place reached, for the next attempt of a launcher that restarts the run (loop/watch/run_watch.py)
  .lock                held while the run is trained
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspeed.config import Config, RunConfig, dump_config, load_record, video_config
from mmspeed.config.places import require_run
from mmspeed.config.tasks import recorded_task
from mmspeed.data.cache.files import private_file, write_whole
from mmspeed.errors import UserError
from mmspeed.log import get_logger, metrics_row
from mmspeed.redaction import redacted, redacted_tree
from mmspeed.rng import VERSION

log = get_logger("train")

FACTS = "run"  # in `meta` of a checkpoint: the contents of run.json


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files."""

    root: Path

    @property
    def config_file(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def pipeline(self) -> Path:
        return self.root / "pipeline.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def codec_weights(self) -> Path:
        return self.root / "codec.safetensors"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.safetensors"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @classmethod
    def open(cls, root: str | Path) -> RunFolder:
        """The folder of an existing run. Raises UserError when there is none."""
        return cls(require_run(root))

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Lock the folder against training by another process, inside. Raises UserError when one does for longer than `patience` seconds.

        The lock is the operating system's, so a killed process leaves none behind.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "a") as file:  # as it is, should it be a link to another file
            deadline = time.monotonic() + patience
            try:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() >= deadline:
                            raise
                        time.sleep(0.2)
            except BlockingIOError:
                raise UserError(
                    f"{self.root} is being trained by another process; wait for it, or choose another `name`"
                ) from None
            except OSError as error:  # a file system without locks
                log.warning(f"{self.root} cannot be locked ({error}): do not start this run twice")
            yield

    def steps(self) -> list[int]:
        """The steps of its whole checkpoints, rising."""
        from mmspeed.loop.checkpoint.storage import steps_in

        return steps_in(self.checkpoints)

    def run_config(self) -> RunConfig:
        """The resolved config of the run, of any task."""
        return load_record(self.config_file)

    def task(self) -> str:
        """The name of the run's task, from its config as it was written; the rest is neither read nor checked."""
        return recorded_task(self.config_file)

    def config(self) -> Config:
        """The resolved config of a run of the video task. Raises UserError for a run of another task."""
        return video_config(self.run_config(), str(self.root))

    def info(self) -> dict[str, Any]:
        """The facts of run.json, from the newest checkpoint; from run.json itself where none holds them.

        Raises UserError where that is missing or damaged.
        """
        sealed = self._sealed()
        return dict(sealed[FACTS]) if FACTS in sealed else self._stored()

    def _stored(self) -> dict[str, Any]:
        """The contents of run.json. Raises UserError when it is missing or damaged."""
        path = self.root / "run.json"
        try:
            contents = json.loads(path.read_bytes())
            if not isinstance(contents, dict):
                raise ValueError("it is no JSON object")
            return contents
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} cannot be read ({error}); start the training again to rewrite it") from None

    def _sealed(self) -> dict[str, Any]:
        """`meta` of the newest checkpoint whose meta.json is as it was written; empty without one."""
        from mmspeed.loop.checkpoint.storage import DamageError, sealed_meta, step_name

        for step in reversed(self.steps()):
            with suppress(DamageError, UserError):
                return dict(sealed_meta(self.checkpoints / step_name(step)).get("meta", {}))
        return {}

    def check_generator(self) -> None:
        """Raise UserError for a run that draws with another version of the generator (`mmspeed.rng`).

        Its newest checkpoint says it; before there is one, run.json.
        """
        record = self._sealed()
        if not record:
            try:
                record = self._stored()
            except UserError:
                return  # nothing of it was drawn that lasts
        versions = record.get("versions", {"generator": 1})
        version = versions.get("generator") if isinstance(versions, dict) else versions
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{self.root} draws with generator {version}, this mmspeed with {VERSION}: use a newer mmspeed"
            )
        if version != VERSION:
            raise UserError(
                f"{self.root} is a run of an earlier mmspeed (generator {version}), which drew other numbers: choose another `name`"
            )

    def check_same(self, config: RunConfig) -> list[str]:
        """Keys that differ from the run's own config, such as `train.steps`.

        Raises UserError for a run of another task, and when one of `fixed_on_resume` differs.
        """
        if not self.config_file.exists():
            return []
        recorded = load_record(self.config_file)
        if recorded.task != config.task:
            raise UserError(
                f"{self.root} is a run of the task {recorded.task}, and this config is of the task {config.task}: choose another `name`"
            )
        before, now = recorded.model_dump(by_alias=True), config.model_dump(by_alias=True)
        changed = _differing_keys(before, now)
        for section, key in config.free_on_resume:
            for tree in (before, now):
                tree.get(section, {}).pop(key, None)
        names = config.fixed_on_resume
        earlier, later = ({name: tree[name] for name in names if name in tree} for tree in (before, now))
        fixed = _differing_keys(earlier, later)
        if fixed:
            raise UserError(
                f"{self.root} was started with another {', '.join(fixed)}: restore the config, or choose another `name` for this run "
                "(train.start_from begins with the weights of another)"
            )
        return changed

    def check_base(self, files: Mapping[str, str]) -> None:
        """Raises UserError where the run began with other files of weights than these, by the fingerprints of roles in its facts."""
        try:
            recorded = self.info().get("base", {})
        except UserError:  # a new run, or a lost record
            return
        changed = [role for role, fingerprint in files.items() if recorded.get(role, fingerprint) != fingerprint]
        if changed:
            raise UserError(
                f"{self.root} was started from another base: the weights of the role {changed[0]} in the repository have changed since "
                "(model.pretrained, model.revision). Restore them, or choose another `name` for this run"
            )

    def write_start(self, config: RunConfig, info: dict[str, Any], files: Mapping[str, Path]) -> None:
        """Write config.yaml, run.json and copies of `files` (by their names here), each whole or not at all.

        run.json holds no secrets; config.yaml needs those of the config to go on, and then its owner alone may read it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for name, source in files.items():
            (self.root / name).parent.mkdir(
                parents=True, exist_ok=True
            )  # a name may have a folder, as a tokenizer's files have
            with private_file(self.root / name) as temporary:
                shutil.copyfile(source, temporary)
                sync_file(temporary)
        path, stored = self.root / "run.json", {}
        with suppress(UserError):
            stored = self._stored()
        if path.exists() and (lost := [name for name in info if name not in stored]):
            log.warning(f"{path} lacked {', '.join(lost)}: it is written anew")
        write_text(path, json.dumps(redacted_tree(info), indent=2) + "\n")
        text = dump_config(config)
        write_text(self.config_file, text, 0o600 if redacted(text) != text else 0o644)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys whose values have changed."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _differing_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values have changed, inside sections too; a list counts as one value."""
    keys = []
    for name in _differing(before, now):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys += _differing_keys(old, new, f"{prefix}{name}.") or [f"{prefix}{name}"]
        else:
            keys.append(f"{prefix}{name}")
    return keys


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk, before it gets its name."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a text file whole or not at all (law 4). `mode`: its permissions. Raises UserError when the disk is full."""
    write_whole(path, text.encode("utf-8"), mode=mode)


def trim_metrics(path: Path, step: int) -> None:
    """Drop the rows after `step`, which a resumed run writes again; lines that no run writes go to `metrics.odd` beside it, with a line."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    if metrics_row(lines[-1]) is None:
        del lines[-1]  # empty, or what a kill cut off
    rows = [(line, metrics_row(line)) for line in lines if line.strip()]
    if odd := [line for line, row in rows if row is None]:
        aside = path.with_name("metrics.odd")
        write_whole(aside, _lines([*aside.read_bytes().splitlines(), *odd] if aside.exists() else odd))
        log.warning(f"{path} had lines that no run writes, which are kept in {aside}: {len(odd)}")
    write_whole(path, _lines([line for line, row in rows if row is not None and row.get("step", 0) <= step]))


def _lines(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
