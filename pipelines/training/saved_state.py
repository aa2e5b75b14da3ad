"""The saved states of a run: what it goes on from at its start and after a spike, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmspeed import comm, rng
from mmspeed.config import RunConfig
from mmspeed.errors import UserError, first_names
from mmspeed.log import format_seconds, get_logger
from mmspeed.loop.checkpoint.load import identity, identity_of_start, learned, load_start, starting_checkpoint
from mmspeed.loop.checkpoint.manager import CheckpointManager, DamagedCheckpointError
from mmspeed.loop.frozen import frozen_names
from mmspeed.loop.guard import RollBackError
from mmspeed.models.adapter_files import adapter_files
from mmspeed.parallel import unwrap
from mmspeed.parallel.stages import count_parameters
from mmspeed.pipelines.run.agreement import require_agreement
from mmspeed.pipelines.run.assembly import base_files
from mmspeed.pipelines.run.run_folder import FACTS, RunFolder, trim_metrics
from mmspeed.pipelines.run.telemetry import Telemetry
from mmspeed.pipelines.training.adapter_start import check_adapters, identity_of_files, start_from_files
from mmspeed.pipelines.training.opening import rate_line
from mmspeed.pipelines.training.run_state import Run
from mmspeed.redaction import redacted_tree

log = get_logger("train")

LONG_WAIT = 1.0  # seconds of waiting for the write before, above which there is a line


@dataclass(frozen=True)
class NewestState:
    """The saved state that a run goes on from: the name of its newest checkpoint, and the copy on this rank's local disk."""

    name: str | None = None
    copy: Path | None = None

    @property
    def fresh(self) -> bool:
        """True for a run that begins."""
        return self.name is None and self.copy is None


class SavedStates:
    """The checkpoints of a run in its folder and on local disks. All methods but `manager` are collective calls."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.facts: dict[str, Any] = {}  # of the run, for run.json and each checkpoint

    def manager(self) -> CheckpointManager:
        """The manager of the run's checkpoints, as the config says."""
        section = self.config.checkpoint
        return CheckpointManager(
            self.folder.checkpoints,
            keep_last=section.keep_last,
            keep_best=section.keep_best,
            keep_every=section.keep_every,
            keep_hours=section.keep_hours,
            local=Path(section.local) if section.local is not None else None,
            keep_local=section.keep_local,
        )

    def find(self, manager: CheckpointManager) -> NewestState:
        """The newest saved state, whose bytes are not looked at yet."""
        # rank 0 looks for it: another node's view of the folder may be older
        latest = manager.latest() if dist.get_rank() == 0 else None
        name = comm.broadcast_object(latest.name if latest is not None else None)
        return NewestState(name, manager.newest_copy(name))

    def resume(self, run: Run, newest: NewestState) -> None:
        """Resume from the newest sound checkpoint, or begin, with the weights of train.start_from if it is set."""
        config, parts, where = self.config, run.parts, run.place
        changed = self.folder.check_same(config)
        before = self.folder.run_config().train if "train.steps" in changed else config.train
        files = base_files(parts.models)
        self.folder.check_base(files)
        name, copy, start = newest.name, newest.copy, config.train.start_from
        # weights that checkpoints do not hold and `start` gives; the base under adapters is of other files
        frozen = bool(run.task.copies() or (config.adapter is None and frozen_names(parts.model)))
        if start is not None and (newest.fresh or frozen):
            for difference in run.task.domain.compare_start(start) if where.rank == 0 and newest.fresh else ():
                log.warning(difference)
            adapters = adapter_files(start)
            same = identity_of_files(adapters) if adapters else identity_of_start(start)
            require_agreement({"train.start_from": same}, "give all of them the same checkpoint or file")
            if adapters:
                start_from_files(adapters, config, run)
            else:
                check_adapters(start, config, files)
                self._load_start(start, run)
        if copy is not None and self._restore_copy(run, copy, changed, name):
            name = None
        while name is not None:
            try:
                self.restore(run, self.folder.checkpoints / name, changed)
                break
            except DamagedCheckpointError as error:
                name = self._fall_back(run, name, error)
        line = rate_line(before, config.train, run.step) if run.step < config.train.steps else None
        if line is not None and where.rank == 0:
            log.warning(line)
        bases = self._bases(run)
        parameters, _ = count_parameters(unwrap(parts.model))
        info = {**run.task.domain.info(), "parameters": parameters, "data": run.data.fingerprint}
        info["versions"] = {"generator": rng.VERSION}
        self.facts = info | bases | ({"base": files} if files else {})
        if where.rank == 0 and run.step < config.train.steps:
            self.folder.write_start(config, self.facts, run.task.domain.files())
            trim_metrics(self.folder.metrics, run.step)
        comm.barrier()

    @staticmethod
    def _load_start(start: str, run: Run) -> None:
        """Take the weights of `train.start_from`: of the first role, of the others that it holds, and of the roles that the rest are copies of."""
        parts, folder = run.parts, starting_checkpoint(start)
        first, copies = parts.roles[0], run.task.copies()
        for role in dict.fromkeys([*parts.roles, *copies]):
            held = [name for name in (role, copies.get(role, role)) if name == first or learned(folder, name)]
            if not held:
                if run.place.rank == 0:
                    log.warning(f"train.start_from: {folder} holds no weights of the role {role}, which keeps its own")
                continue
            model = parts.models[role]
            load_start(start, model, parts.optimizers.get(role), None if held[0] == first else held[0])
            if role in parts.averages:
                parts.averages[role].restart(model)

    def _restore_copy(self, run: Run, copy: Path, changed: list[str], name: str | None) -> bool:
        """Take the state of the copies on the local disks. False where they cannot be used, and the checkpoint `name` is to be read."""
        try:
            self.restore(run, copy, changed)
        except DamagedCheckpointError as error:
            if name is None:  # the state may be a part of the copy's, and there is nothing else to read
                raise
            if run.place.rank == 0:
                log.warning(f"{error}\nthe copies are not used: the run goes on from {name}")
            return False
        if run.place.rank == 0:
            log.info(f"going on from the copies of step {run.step} on the local disks")
        return True

    def restore(self, run: Run, path: Path, changed: list[str] | None) -> None:
        """Take the state of a checkpoint, and say so with the settings that have `changed` since; None: say nothing.

        Raises DamagedCheckpointError on all ranks; the state may then be a part of it.
        """
        run.parts.wake()
        for balance in run.balances:
            balance.go_home()
        config, where, state = self.config, run.place, run.parts.state()
        run.manager.check(path)
        own = path.parent == self.folder.checkpoints
        if own:  # copies on local disks hold the parts of their own hosts
            require_agreement({"checkpoint": identity(path)}, "give all of them the same run folder")
        run.manager.check_frozen_roles(path, state.frozen)
        meta = run.manager.load(path, state.model, state.optimizer, state.ema)
        for role, other in state.others.items():
            run.manager.load(path, other.model, other.optimizer, other.ema, role)
        run.guard.resume(meta)
        run.step = int(meta["step"])
        if where.rank == 0 and (changed or (changed is not None and own and run.step < config.train.steps)):
            since = f"; changed since it was saved: {', '.join(changed)}" if changed else ""
            log.info(f"going on from step {run.step}{since}")
        message = run.data.resume(meta["order"])
        if message is not None and where.rank == 0 and run.step < config.train.steps:
            log.warning(f"step {run.step}: {message}")

    def roll_back(self, run: Run, spike: RollBackError) -> dict[str, Any]:
        """Return to the newest checkpoint from before a spike, and leave the spike's samples out; returns a row of metrics.jsonl.

        Raises UserError without such a checkpoint.
        """
        last, spikes = run.step, run.guard.spikes
        checkpoint = run.manager.newest_until(spikes.sound(last) or 0)
        if checkpoint is None:
            raise UserError(
                f"{spike.line}. No checkpoint has {spikes.rule.steps} calm steps after it, so there is none to return to: "
                "lower train.lr or checkpoint.every"
            )
        samples = run.data.leave_out(range(spike.first - 1, last))
        spikes.roll_backs, spikes.left_out = spikes.roll_backs + 1, spikes.left_out + len(samples)
        self.restore(run, checkpoint, None)
        run.manager.remove_after(run.step)
        if run.place.rank == 0:
            trim_metrics(self.folder.metrics, run.step)
            log.warning(
                f"{spike.line}. Going back to step {run.step}, without the samples of these steps: {first_names(samples)} "
                f"(roll-back {spikes.roll_backs} of {spikes.rule.roll_backs})"
            )
        comm.barrier()
        return {"kind": "roll_back", "step": spike.first, "last": last, "to": run.step, "samples": list(samples)}

    @staticmethod
    def keep_sound(run: Run) -> None:
        """Keep the newest checkpoint that is known to be from before the spike under way, else the one that its first step came after."""
        spikes = run.guard.spikes
        sound = run.manager.newest_until(spikes.sound(run.step) or 0)
        if sound is None and spikes.first is not None:
            sound = run.manager.newest_until(spikes.first - 1)
        if sound is not None:
            run.manager.keep(sound)

    def _fall_back(self, run: Run, name: str, error: DamagedCheckpointError) -> str:
        """Move a damaged checkpoint aside; returns the name of the one before it.

        Raises `error` without one, or where `train.resume` is strict.
        """
        names = run.manager.set_aside(name) if self.config.train.resume == "newest" else None
        if names is None:
            raise error
        aside, older = names
        if run.place.rank == 0:
            log.warning(f"{error}\nit is kept as {aside}, and the run goes on from {older} (train.resume: newest)")
        return older

    def _bases(self, run: Run) -> dict[str, Any]:
        """Fingerprints for run.json of weights that do not train, those of further models by role. A collective call."""
        state, manager = run.parts.state(), run.manager
        base = manager.frozen(state.model)
        others = {role: other.model for role, other in state.others.items()} | dict(state.frozen)
        by_role = {role: manager.frozen(model, role) for role, model in others.items()}
        roles = {role: {"frozen": fingerprint} for role, fingerprint in by_role.items() if fingerprint is not None}
        return ({"frozen": base} if base is not None else {}) | ({"roles": roles} if roles else {})

    def save(self, run: Run, telemetry: Telemetry, blocking: bool) -> None:
        """Save, and write a row of how long training stood still for it."""
        meta = {
            "step": run.step,
            "order": run.data.state(run.step),
            **run.guard.state(),
            "world": run.place.world,
            "versions": {"generator": rng.VERSION},
            FACTS: redacted_tree(self.facts),
        }
        run.parts.wake()
        blocking = blocking or not self.config.checkpoint.asynchronous
        with run.experts_at_home():
            stall = run.manager.save(run.step, run.parts.state(meta), blocking=blocking)
        row = {"kind": "checkpoint", "step": run.step, "wait_seconds": stall.waited, "copy_seconds": stall.copied}
        if run.manager.local is not None:
            row["local_failures"] = run.manager.local.failures
        telemetry.write(row)
        if stall.waited > LONG_WAIT and run.place.rank == 0 and not blocking:
            log.warning(
                f"step {run.step}: training waited {format_seconds(stall.waited)} until the checkpoint before this one was written; "
                "raise checkpoint.every, or write to a faster disk"
            )
