"""`TrainPipeline`: cache -> batch -> objective -> model -> loss, handed to the loop's step.

The order of a run stands in `TrainPipeline.run`, the way of one micro-batch in `assemble.make_loss`.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from mmspeed import comm
from mmspeed.compute.sparse.controller import SparsityController
from mmspeed.config import Config
from mmspeed.data import (
    FirstEpoch,
    Maker,
    Step,
    count_present,
    imbalance,
)
from mmspeed.device import parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, get_logger
from mmspeed.loop.checkpoint import CheckpointManager, TrainingState
from mmspeed.loop.optim import learning_rate, set_learning_rate
from mmspeed.loop.signals import StopSignals
from mmspeed.loop.start import load_start
from mmspeed.loop.step import StepResult, train_step
from mmspeed.mesh import patient_group, process_group
from mmspeed.models import build_model
from mmspeed.models.sparse_note import sparse_lines, sparse_warnings
from mmspeed.pipelines.assemble import assemble, place
from mmspeed.pipelines.during import Observer
from mmspeed.pipelines.memory_care import MemoryCare
from mmspeed.pipelines.memory_choice import usual_batch, ways_under_budget
from mmspeed.pipelines.mlp_trials import MlpTrials
from mmspeed.pipelines.opening import open_cache
from mmspeed.pipelines.order import batching_of, make_order
from mmspeed.pipelines.outcome import TrainResult
from mmspeed.pipelines.run_folder import RunFolder, other_shape, trim_metrics
from mmspeed.pipelines.telemetry import Telemetry
from mmspeed.pipelines.trial import latent_in
from mmspeed.shapes import Strides

log = get_logger("train")


class TrainPipeline:
    """Trains a config's model from its cache, or goes on with a run that was stopped.

    With a `maker` (`mmspeed.preprocess.OnlineBuilder`) a cache that is missing or not whole is completed during the first epoch;
    without one it is an error. `run()` raises UserError for that, for a run of that name with another model, a non-finite loss,
    a full disk.
    """

    def __init__(self, config: Config, maker: Maker | None = None) -> None:
        self.config, self.maker = config, maker
        self.folder = RunFolder(config.run_dir)
        self.dtype = parse_dtype(config.device.dtype)

    def run(self) -> TrainResult:
        self.device = pick(self.config.device.kind)
        self.device.activate()
        with process_group(self.device), self.folder.locked() if dist.get_rank() == 0 else nullcontext():
            return self._run()

    def _run(self) -> TrainResult:
        started = time.monotonic()
        self._join()
        self._open_data()
        self._build()
        step = self._resume()
        if step >= self.config.train.steps:
            self.manager.wait()
            return TrainResult(self.folder.root, step, True, True, None, 0.0)
        with Telemetry(
            self.config, self.folder.root, self.device, self.world, self.rank == 0, self._peak()
        ) as telemetry:
            try:
                step, stopped, loss = self._train(step, telemetry)
            except UserError:
                self.manager.wait()  # all ranks are here: let the checkpoint under way become whole
                raise
            finally:
                if self.loader.first_epoch is not None:
                    self.loader.first_epoch.close()
        return TrainResult(self.folder.root, step, not stopped, False, loss, time.monotonic() - started)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.placement = place(self.config, self.device)
        self.strategy = self.placement.strategy

    def _open_data(self) -> None:
        config = self.config
        self.group = patient_group() if self.maker is not None else None
        self.cache, self.whole = open_cache(config, self.maker, self.device, self.rank, self.world, self.group)
        self.strides = Strides(*self.cache.info["encoders"]["vae"]["strides"])

    def _build(self) -> None:
        """The model without weights, the order of the steps, the choice of what is kept for backward, and the model with its weights."""
        config, encoders = self.config, self.cache.info["encoders"]
        model = build_model(config.model, encoders["vae"]["channels"], encoders["text"]["width"], device="meta")
        self.bare = model
        latents = {b: latent_in(b, self.strides, model.config) for b in sorted(self.cache.samples.buckets())}
        for line in sparse_lines(model, latents) if self.rank == 0 else ():
            log.info(line)
        for warning in sparse_warnings(model, latents, config) if self.rank == 0 else ():
            log.warning(warning)
        setting = (config, self.cache, model, self.strides, self.device, self.strategy, self.world, self.rank)
        batching, costs = batching_of(*setting)
        self.sampler, self.loader = make_order(config, self.cache, batching, self.device, self.world, self.rank)
        choice = ways_under_budget(*setting, batching, costs, self.placement.lanes)
        parts = assemble(config, model, self.placement, self.device, choice)
        self.model, self.optimizer, self.ema = parts.model, parts.optimizer, parts.ema
        self.objective = parts.objective
        self.mlp_trials = MlpTrials(model, self.placement.layout, self.dtype, self.device, self.rank == 0)
        self.loss_fn = self.mlp_trials.watching(parts.loss_fn)
        self.sparsity = SparsityController.of(model)
        if self.sparsity is not None:
            layer = next(iter(self.sparsity.layers.values()))
            layer.try_out(self.device.torch_device, self.dtype, model.config.width // model.config.heads)

    def _resume(self) -> int:
        """The step to go on from; 0 for a new run."""
        config = self.config
        self.manager = CheckpointManager(
            self.folder.checkpoints,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        )
        changed = self.folder.check_same(config)
        # rank 0 looks: another node's view of the folder may be older
        found = self.manager.latest() if self.rank == 0 else None
        name = comm.broadcast_object(found.name if found is not None else None)
        step = self.skipped = 0
        if name is None and config.train.start_from is not None:
            for difference in other_shape(config.train.start_from, config.model) if self.rank == 0 else ():
                log.warning(difference)
            load_start(config.train.start_from, self.model, self.optimizer)
            if self.ema is not None:
                self.ema.restart(self.model)
        if name is not None:
            path = self.folder.checkpoints / name
            meta = self.manager.load(path, self.model, self.optimizer, self.ema)
            step, self.skipped = int(meta["step"]), int(meta["skipped"])
            if changed and self.rank == 0:
                log.info(f"going on from step {step}; changed since it was saved: {', '.join(changed)}")
            if "order" not in meta:
                raise UserError(
                    f"{path} is of an earlier mmspeed, which wrote no place in the order: choose another `name`"
                )
            told = self.sampler.resume(meta["order"])
            if told is not None and self.rank == 0 and step < config.train.steps:
                log.warning(f"step {step}: {told}")
        if self.rank == 0 and step < config.train.steps:
            self.folder.write_start(config, self._info(), config.codec_weights)
            trim_metrics(self.folder.metrics, step)
        comm.barrier()
        return step

    def _info(self) -> dict[str, Any]:
        encoders = self.cache.info["encoders"]
        return {
            "latent_channels": encoders["vae"]["channels"],
            "strides": encoders["vae"]["strides"],
            "text_width": encoders["text"]["width"],
            "encoders": encoders,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "data": self.sampler.fingerprint,
        }

    # -- the loop -------------------------------------------------------------------------------------------------

    def _train(self, step: int, telemetry: Telemetry) -> tuple[int, bool, float | None]:
        """From `step` to the end. Returns (step reached, stopped early, last loss)."""
        config, train = self.config, self.config.train
        observer = Observer(self)
        self._prepare_first_epoch(step, observer)
        self._try_mlps()
        loss, stopped = None, False
        telemetry.resume_clock()
        with (
            MemoryCare(config, self.device, self.folder.root, self.model, self.optimizer, self.ema) as care,
            StopSignals(self.folder.root) as signals,
            ProgressLine("train", train.steps, "step", start=step) as line,
            closing(self.loader.steps(step, train.steps)) as steps,
        ):
            for data in steps:
                # 1. one optimizer step
                rate = learning_rate(step, train)
                set_learning_rate(self.optimizer, rate)
                if self.sparsity is not None:
                    self.sparsity.before_step(step)
                result = self._step(step + 1, data)
                if self.sparsity is not None:
                    self.sparsity.after_step(comm.all_reduce_sum, finite=result is None or result.finite)
                epoch = self.sampler.locate(step).epoch
                step += 1
                # 2. a step that is not finite changed nothing, and too many end the run
                if result is None:
                    self._all_lost(step, data, telemetry)
                elif result.finite:
                    loss = result.loss
                    if self.ema is not None:
                        self.ema.update(self.model)
                else:
                    self._non_finite(step, result, telemetry)
                care.after_step(step)
                # 3. what is told
                self._count(data, telemetry)
                line.advance(note="" if result is None else f"loss {result.loss:.4f}")
                last = step == train.steps
                if result is not None and (last or step % train.log_every == 0):
                    telemetry.write(self._row(step, epoch, data, result, rate) | self._rates(telemetry))
                # 4. signals, checkpoint, validation: in this order, on all ranks, so that no mistake in validation costs a step
                wish = signals.poll()
                due = last or wish != "none" or step % config.checkpoint.every == 0
                if due:
                    self._save(step, blocking=last or wish == "stop")
                if last or step % config.validate_.every == 0:
                    with care.around_validation():
                        best = self._observe(observer, step, telemetry)
                    if best and not due:
                        self._save(step, blocking=False)
                self.manager.poll()
                telemetry.resume_clock()
                if wish == "stop" and not last:
                    stopped = True
                    break
        self._end_first_epoch(step, telemetry)
        self.manager.wait()
        return step, stopped, loss

    def _try_mlps(self) -> None:
        """Compare MLPs in parts with whole ones on this device, for the micro-batches that this run usually has."""
        model, batching, lanes = self.bare.config, self.sampler.batching, self.placement.lanes
        usual = [
            (latent_in(bucket, self.strides, model), usual_batch(batching, bucket, lanes)[0])
            for bucket in sorted(self.cache.split("train").buckets())
        ]
        self.mlp_trials.before_steps(usual)

    def _prepare_first_epoch(self, step: int, observer: Observer) -> None:
        """Hand the loader what completes the cache, when it is not whole."""
        if self.whole:
            return
        assert self.maker is not None
        self.loader.first_epoch = FirstEpoch(
            self.cache,
            self.sampler,
            self.maker,
            self.rank,
            self.world,
            start=step,
            stop=self.config.train.steps,
            held_out=list(observer.samples),
            group=self.group,
        )

    def _end_first_epoch(self, step: int, telemetry: Telemetry) -> None:
        """Tell what the first epoch made, when this run made it; one that was broken off is stored as far as it came."""
        first = self.loader.first_epoch
        if first is None:
            return
        row: dict[str, Any] = {"kind": "cache", "step": step, "entries": first.made, "lost": len(first.lost)}
        if first.freed is not None:
            row |= {"memory_before": first.freed[0], "memory_after": first.freed[1]}
        telemetry.write(row)

    def _step(self, number: int, data: Step) -> StepResult | None:
        """One update; None when every sample of the step is lost."""
        present = count_present(data.draws)
        if not present:
            return None
        try:
            return train_step(
                self.model,
                data.batches,
                self.loss_fn,
                self.optimizer,
                global_samples=present,
                world=self.world,
                clip_norm=self.config.train.clip_norm,
                strategy=self.strategy,
                tensor=self.placement.layout.tensor,
            )
        except UserError as error:
            raise UserError(f"step {number}: {error}") from error

    def _count(self, data: Step, telemetry: Telemetry) -> None:
        """One step is done: what it computed on all devices. Captions count as the longest that this rank met."""
        buckets = Counter(draw.sample.bucket for draw in data.draws if not draw.sample.lost)
        latents = {bucket: self.strides.latent(bucket) for bucket in buckets}
        text_tokens = data.batches.text_tokens
        telemetry.count_step(
            samples=buckets.total(),
            tokens=sum(count * self.bare.tokens(latents[bucket]) for bucket, count in buckets.items()),
            forward_flops=sum(
                count * self.bare.dense_flops(latents[bucket], text_tokens) for bucket, count in buckets.items()
            ),
            waited_seconds=self.loader.waited_seconds,
        )

    def _rates(self, telemetry: Telemetry) -> dict[str, Any]:
        """Throughput since the last row; with sparse attention also what its layers keep."""
        if self.sparsity is None:
            return telemetry.rates()
        rates = telemetry.rates(saved_flops=self.sparsity.saved_flops(comm.all_reduce_sum))
        return rates | {"attention": [asdict(row) for row in self.sparsity.rows]}

    def _all_lost(self, step: int, data: Step, telemetry: Telemetry) -> None:
        sources = [draw.sample.source for draw in data.draws]
        log.warning(
            f"step {step} has no sample: {', '.join(sources[:4])} failed (see rejects in {self.config.cache_root})"
        )
        telemetry.write({"kind": "lost", "step": step, "samples": sources})

    def _row(self, step: int, epoch: int, data: Step, result: StepResult, rate: float) -> dict[str, Any]:
        return {
            "kind": "train",
            "step": step,
            "epoch": epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "samples": count_present(data.draws),
            "bucket": "+".join(str(bucket) for bucket in sorted({draw.sample.bucket for draw in data.draws})),
            "imbalance": imbalance(data.draws, self.sampler.batching, self.world),
            "skipped_steps": self.skipped,
        }

    def _observe(self, observer: Observer, step: int, telemetry: Telemetry) -> bool:
        """Validate and sample; whether the held-out loss is the lowest so far, so that this step is worth a checkpoint."""
        row = observer.observe(step)
        if row:
            telemetry.write(row)
        loss = row.get("loss")
        if loss is None:
            return False
        # rank 0 decides: saving takes all ranks, and another node's view of the record may be older
        return bool(comm.broadcast_object(self.manager.mark_best(step, loss) and self.config.checkpoint.keep_best))

    def _save(self, step: int, blocking: bool) -> None:
        meta = {"step": step, "order": self.sampler.state(step), "skipped": self.skipped, "world": self.world}
        self.manager.save(
            step,
            TrainingState(self.model, self.optimizer, self.ema, meta),
            blocking=blocking or not self.config.checkpoint.asynchronous,
        )

    def _peak(self) -> tuple[float, str]:
        """(peak FLOP/s of one device, where the figure is from), the same on all ranks."""
        if self.config.device.peak_tflops is not None:
            return self.config.device.peak_tflops * 1e12, "device.peak_tflops in the config"
        flops, source = comm.broadcast_object(list(self.device.peak_flops(self.dtype)) if self.rank == 0 else None)
        return flops, source

    def _non_finite(self, step: int, result: StepResult, telemetry: Telemetry) -> None:
        """Write down a step that was left out. Raises UserError when there are more than train.skip_non_finite."""
        self.skipped += 1
        samples = ", ".join(result.bad[:8]) or "none alone (the gradient overflowed)"
        message = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; samples with a non-finite loss: {samples}"
        telemetry.write({"kind": "non_finite", "step": step, "loss": result.loss, "samples": result.bad})
        if self.skipped > self.config.train.skip_non_finite:
            raise UserError(
                f"{message}. Nothing was updated. Lower train.lr, look at these samples, or allow skips with train.skip_non_finite."
            )
        log.warning(f"{message}; the step is skipped ({self.skipped} of {self.config.train.skip_non_finite})")
