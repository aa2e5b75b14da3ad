"""What the core may look up, cast and leave open: exact lines with their reason, and names by file. None is a model, a task or a batch."""

from __future__ import annotations

# reason -> file -> lines
ALLOWED: dict[str, dict[str, set[str]]] = {
    "torch's own signatures are narrower than what it takes, or give Any": {
        "mmspeed/loop/checkpoint/load.py": {
            "cast(dict[str, Any], wanted),",
        },
        "mmspeed/loop/checkpoint/local.py": {
            "cast(dict[str, Any], tensors), storage_writer=writer, planner=_HostPlanner(), process_group=self.group",
        },
        "mmspeed/loop/checkpoint/manager.py": {
            "dcp.save(cast(dict[str, Any], staged.tensors), storage_writer=writer, process_group=self.group)",
        },
        "mmspeed/loop/checkpoint/state.py": {
            "tensors = cast(dict[str, Tensor], get_model_state_dict(model))",
            "set_optimizer_state_dict(self._model, optimizer, cast(Any, self._all | self.tensors), options=_FLAT)",
        },
        "mmspeed/loop/checkpoint/storage.py": {
            "name, tensor = item.index.fqn, cast(Tensor, data)  # save() passes tensors only",
            "results = super().write_data(plan, cast(SavePlanner, hashing)).wait()",
            "written = {(r.index.fqn, r.index.offset): cast(_SealedResult, r) for rank in results for r in rank}",
        },
        "mmspeed/memory/offload/storage_view.py": {
            "looking.set_(memory_Z.untyped_storage(), offset // self.dtype.itemsize, self.shape, self.strides)  # type: ignore[call-overload]",  # noqa: E501
            "return flat_Z.set_(storage, start, (end - start,), (1,))  # type: ignore[call-overload,no-any-return]",
        },
        "mmspeed/memory/offload/offloader.py": {
            "self._out = depot.copies.out(self._lying.memory_Z, self._buffer)  # type: ignore[arg-type]",
        },
        "mmspeed/memory/planning/tracked.py": {
            "class _Tracker(memory_tracker_class()):  # type: ignore[misc]",
        },
        "mmspeed/memory/recompute/regions.py": {
            "return cast(T, discarded(before, cast(Any, run), *args, exchange_again=self.exchange_again))",
            "return cast(T, run_region(run, *args, policy=self.policy, fates=self.op_policies, group=group, rng=self.rng))",
        },
        "mmspeed/parallel/data_parallel.py": {
            "module.set_gradient_divide_factor(cast(float, _Undivided()))",
        },
        "pipelines/tuning/memory_measure.py": {
            "return cast(Tensor, self.args[0] if self.args else next(iter(self.kwargs.values())))",
        },
    },
    "a word whose values a type or a table lists": {
        "mmspeed/loop/checkpoint/load.py": {
            "load_weights(folder, unwrap(model), which, alone, optimizer, role)  # type: ignore[arg-type]",
        },
        "mmspeed/memory/planning/options.py": {
            "cast(ActivationPolicies, dict(block[option].ways))",
        },
        "mmspeed/memory/recompute/policy.py": {
            "return BlockPolicies(tuple(choice), **settings)  # type: ignore[arg-type]",
        },
        "mmspeed/memory/recompute/region.py": {
            "fate: OpPolicy = getattr(self.policy, kind)",
        },
        "mmspeed/parallel/__init__.py": {
            "return cast(Strategy, strategy)",
        },
        "mmspeed/parallel/sequence/hybrid_attention.py": {
            "return chosen(q_BAND, k_BAMD, v_BAMD, key_mask_BM, backend=cast(Backend, backend), counter=counter)",
        },
        "pipelines/tuning/memory_search.py": {
            "cast(tuple[ActivationPolicies, ...], ways),",
        },
    },
    "names of torch's operators, dtypes, autograd nodes and tensor subclasses": {
        "mmspeed/loop/checkpoint/merging.py": {
            'tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))',
        },
        "mmspeed/loop/checkpoint/state.py": {
            'dequantize = getattr(state, "dequantize", None)',
        },
        "mmspeed/loop/checkpoint/storage.py": {
            'properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))',
            "kind = isinstance(getattr(torch, dtype, None), torch.dtype)",
        },
        "mmspeed/memory/offload/storage_view.py": {
            'parameter = getattr(node, "variable", None)',
            'source = getattr(copy.grad_fn.next_functions[0][0], "variable", None)',
        },
        "mmspeed/memory/optimizer/states.py": {
            "inner = {name: transform(getattr(value, name), change) for name in names}",
        },
        "mmspeed/memory/recompute/region.py": {
            "getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()",
            "packets = [getattr(torch.ops.aten, name, None) for name in names]",
        },
        "pipelines/tuning/memory_estimate.py": {
            'source = getattr(copy.grad_fn.next_functions[0][0], "variable", None)',
        },
    },
    "an optimizer, a tracker, a process or a profiler, each asked for first": {
        "mmspeed/loop/checkpoint/state.py": {
            "cast(TieredOptimizer, optimizer).set_master(parameter, local(weights.pop(name)).to(local(parameter).device))",
        },
        "pipelines/run/trackers.py": {
            'if hasattr(tracker, "start"):',
        },
        "pipelines/selfcheck/children.py": {
            "process.stdin.close()  # type: ignore[union-attr]",
        },
        "pipelines/tuning/memory_search.py": {
            "steps = bench = None  # type: ignore[assignment]",
        },
    },
    "Python's own ways: names imported when first used, a frozen dataclass completed, a forward set on an instance": {
        "mmspeed/parallel/boundaries/apply.py": {
            'if "forward" in vars(module):',
        },
        "mmspeed/parallel/boundaries/names.py": {
            'if "forward" in vars(base):',
            'parameters = list(inspect.signature(vars(base)["forward"]).parameters.values())[1:]',
        },
        "mmspeed/parallel/sparse/groups.py": {
            'object.__setattr__(self, "seen_GM", None if seen_BM is None else seen_BM.repeat_interleave(self.masks.heads, 0))',
        },
        "pipelines/__init__.py": {
            "def __getattr__(name: str) -> Any:",
            'return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)',
        },
    },
    "mixins: a class before another is given its attribute, and calls what the protocol of the class behind it declares": {
        "mmspeed/memory/chunks.py": {
            "expands,  # type: ignore[arg-type]",
            "out: Tensor = super().project(x)  # type: ignore[misc]",
        },
        "mmspeed/memory/recompute/regions.py": {
            "own = cast(PreparesInput, super())",
        },
        "mmspeed/parallel/boundaries/boundary.py": {
            "change(argument, lambda x, where, t=tokens: record.reshard(x, t, self.before, self.attends, where))  # type: ignore[misc]",
            "change(argument, lambda x, where, w=what: self.piece(record, x, w, where))  # type: ignore[misc]",
        },
        "mmspeed/parallel/boundaries/linears.py": {
            "x: Tensor = super().prepare(*args)  # type: ignore[misc]",
        },
    },
    "attributes that a plan names, of classes that are not ours": {
        "mmspeed/parallel/boundaries/apply.py": {
            "setattr(module, attribute, value // tp)",
            "value: int = vars(module)[attribute]  # of `check_plan`",
        },
        "mmspeed/parallel/boundaries/names.py": {
            "known = [name for name, value in vars(module).items() if isinstance(value, int) and not isinstance(value, bool)]",
        },
    },
    "what memory itself leaves on blocks of any class": {
        "mmspeed/memory/recompute/block_checkpoint.py": {
            'function: Callable[..., Any] | None = vars(self).get("_gradient_checkpointing_func")',
            'vars(self)["_gradient_checkpointing_func"] = function',
        },
    },
}

# file -> parameters, variables and functions whose type holds Any: rows of JSON, arguments that are passed on, states, drawings
OPEN: dict[str, str] = {
    "pipelines/report/ranks_part.py": "Row show",
    "mmspeed/loop/watch/rank_times.py": "fields row slow",
    "mmspeed/loop/averages.py": "optimizer",
    "mmspeed/loop/callbacks.py": "row",
    "mmspeed/loop/divergence.py": "state",
    "mmspeed/loop/checkpoint/folder.py": "meta",
    "mmspeed/loop/checkpoint/load.py": "_opened entries index load load_weights meta open_checkpoint recorded tensors",
    "mmspeed/loop/checkpoint/manager.py": "_facts _split entries facts future items keep load meta",
    "mmspeed/loop/checkpoint/local.py": "index meta",
    "mmspeed/loop/checkpoint/maintenance.py": "index",
    "mmspeed/loop/checkpoint/merging.py": "index",
    "mmspeed/loop/checkpoint/retention.py": "entries",
    "mmspeed/loop/checkpoint/seals.py": "unsealed value",
    "mmspeed/loop/checkpoint/state.py": "_with_groups optimizer states",
    "mmspeed/loop/checkpoint/storage.py": "_parsed _read_json _read_sealed chunk entry file files index "
    "read_index read_meta read_record resolve_data value values",
    "mmspeed/loop/optimizers/build.py": "Groups group",
    "mmspeed/loop/signals.py": "_before",
    "mmspeed/memory/chunked.py": "_cast tensor",
    "mmspeed/memory/chunks.py": "mixin prepares",
    "mmspeed/memory/optimizer/states.py": "State States identity number transform value",
    "mmspeed/memory/optimizer/tiered_optimizer.py": "_advanced a b groups make param_groups",
    "mmspeed/memory/planning/measure.py": "_alive args func kwargs pointer result",
    "mmspeed/memory/planning/report.py": "optimizer record to_json",
    "mmspeed/memory/planning/tracked.py": "kind kind_of optimizer",
    "mmspeed/memory/recompute/block_checkpoint.py": "__call__ _gradient_checkpointing_func args by_position function kwargs "
    "named once run value",
    "mmspeed/memory/recompute/discard.py": "_ _detached _value args argument autocast",
    "mmspeed/memory/recompute/region.py": "_overloads fates kept matmul_operators op_policies result results run run_region take what",
    "mmspeed/memory/recompute/regions.py": "before op_policies",
    "mmspeed/parallel/boundaries/attention.py": "_run_intercepted args kwargs run",
    "mmspeed/parallel/boundaries/boundary.py": "Arguments _run args arguments_by_name _places begin enter how kind kwargs leave out piece run shape token value",  # noqa: E501
    "mmspeed/parallel/boundaries/names.py": "args arguments kwargs",
    "mmspeed/parallel/boundaries/record.py": "arguments",
    "mmspeed/parallel/sequence/ring.py": "options",
    "mmspeed/parallel/sequence/ring_schedule.py": "compute",
    "pipelines/__init__.py": "__getattr__",
    "pipelines/accelerate.py": "config values",
    "pipelines/report/memory_page.py": "axis figure report_figure",
    "pipelines/report/run_page.py": "_axes figure rows steps validations",
    "pipelines/report/task_check.py": "console",
    "pipelines/run/agreement.py": "reports",
    "pipelines/run/build.py": "meta",
    "pipelines/run/run_folder.py": "_soundest before contents info now",
    "pipelines/run/telemetry.py": "rates row",
    "pipelines/run/trackers.py": "_ARGUMENTS _CONFIGS _VIDEOS _swanlab _tensorboard _trackers _trackio _wandb kind kinds "
    "row tracker tree",
    "pipelines/selfcheck/children.py": "job output outputs",
    "pipelines/selfcheck/run.py": "make",
    "pipelines/selfcheck/worker.py": "job",
    "pipelines/sparsify.py": "config options",
    "pipelines/training/events.py": "_common row",
    "pipelines/training/held_out_loss.py": "row",
    "pipelines/training/oom_advice.py": "frames optimizer segments summed_blocks",
    "pipelines/training/open_cache.py": "recorded wanted",
    "pipelines/training/saved_state.py": "_bases",
    "pipelines/training/trainer.py": "row",
    "pipelines/training/validation.py": "row validate",
    "pipelines/tuning/memory_estimate.py": "_here root",
    "pipelines/tuning/memory_measure.py": "args each kwargs out taken tensors value ways",
    "pipelines/tuning/memory_search.py": "full_setting option_rows setting tries",
    "pipelines/tuning/profile.py": "setting setting_of",
}
