"""Undocumented attributes of torch's objects that fxshard reads outside the files for private names.

`tests/test_architecture.py` checks that each is read in the files named here, and that no other is. A new version of
torch may change any of them.
"""

from __future__ import annotations

from typing import NamedTuple


class TorchAttribute(NamedTuple):
    """Attributes of one kind of object, the files that read them (both separated by spaces), and the purpose."""

    names: str
    owner: str
    files: str
    purpose: str


TORCH_ATTRIBUTES = (
    TorchAttribute(
        "_spec _local_tensor",
        "a DTensor",
        (
            "runtime/gradients.py runtime/flat_shard.py runtime/parameters.py runtime/tensor_parallel.py "
            "sharding/adopt.py ir/meshes.py"
        ),
        "make and read DTensors without autograd and checks",
    ),
    TorchAttribute(
        "_backward_hooks _post_accumulate_grad_hooks",
        "a parameter",
        "runtime/gradients.py runtime/flat_shard.py runtime/eager.py sharding/shard_module.py",
        "run hooks when the gradient is set; refuse earlier hooks and hooks on a copy",
    ),
    TorchAttribute(
        "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks",
        "a module",
        "sharding/blocks.py",
        "share no graph among blocks with other hooks inside",
    ),
    TorchAttribute(
        "_version",
        "a tensor",
        "runtime/unit.py runtime/eager.py ir/writes.py state/weights.py sharding/initial_rows.py",
        "detect writes",
    ),
    TorchAttribute(
        "_parameters _buffers",
        "a module",
        (
            "runtime/flat_shard.py sharding/fixed_places.py sharding/sharded_module.py sharding/swapped_class.py "
            "sharding/shard_module.py sharding/stale_holders.py sharding/release.py inspect/all_ranks.py "
            "inspect/replica.py"
        ),
        "read and replace what is registered",
    ),
    TorchAttribute(
        "_in_backward_optimizers", "a parameter", "sharding/stale_holders.py", "refuse `_apply_optimizer_in_backward`"
    ),
    TorchAttribute(
        "_modules",
        "a module",
        "sharding/sharded_module.py sharding/adopt.py state/lora.py",
        "look into wrappers of `torch.compile` and PEFT, and remove them",
    ),
    TorchAttribute(
        "_compiled_call_impl",
        "a module",
        "sharding/sharded_module.py sharding/adopt.py sharding/regional.py inspect/replica.py",
        "detect `module.compile()`, and undo it",
    ),
    TorchAttribute(
        "_ddp_params_and_buffers_to_ignore",
        "a module",
        "sharding/sharded_module.py",
        "refuse `DistributedDataParallel`",
    ),
    TorchAttribute(
        "_wrapped_by_lr_sched",
        "a step's function",
        "runtime/overlapped_step.py",
        "recognise the wrapper of a scheduler",
    ),
    TorchAttribute(
        "_flat_weights _flat_weights_names",
        "an RNN",
        "sharding/swapped_class.py sharding/release.py",
        "its own list of weights",
    ),
    TorchAttribute(
        "_orig_mod _checkpoint_wrapped_module _fsdp_wrapped_module",
        "names of wrapped modules",
        "state/names.py",
        "the FQN without wrappers",
    ),
    TorchAttribute("_no_split_modules", "a Hugging Face model", "integrations/trainer.py", "its blocks"),
    TorchAttribute("_metadata", "a state_dict", "state/model_state.py", "versions of modules"),
    TorchAttribute("_extra_state", "a key of a state_dict", "state/user_hooks.py", "the result of `get_extra_state()`"),
    TorchAttribute(
        "_get_root_mesh _flatten_mapping _stable_hash",
        "a mesh",
        "ir/meshes.py",
        "further groups of a redistribution; whether Dynamo makes the mesh an input",
    ),
    TorchAttribute(
        "_init_backend _rank", "arguments of DeviceMesh", "inspect/fake_model.py", "make a mesh of fake ranks"
    ),
    TorchAttribute(
        "bound_device_id", "a process group", "runtime/process_groups.py", "detect `init_process_group(device_id=...)`"
    ),
    TorchAttribute(
        "_schema",
        "an op",
        "cost/optimizer_step.py cost/roofline.py ir/collectives.py ir/liveness.py ir/surroundings.py ir/writes.py",
        "its writes, and which results are views",
    ),
    TorchAttribute(
        "_opname _overloadname _qualified_op_name",
        "an op",
        "cost/fusion.py cost/sizes.py ir/collectives.py ir/launches.py ir/text.py runtime/profiler_ranges.py",
        "print it, and recognise collectives",
    ),
    TorchAttribute(
        "recompute ac_graph_id",
        "node.meta",
        "passes/reshard_policy.py",
        "tell torch's partitioner which values to keep",
    ),
    TorchAttribute(
        "eager_input_vals", "node.meta", "passes/call_regions.py", "make Inductor keep the strides of inputs"
    ),
    TorchAttribute(
        "_checkpoint_context_fn",
        "meta of a checkpointed function",
        "ir/spans.py",
        "the policy of selective checkpointing",
    ),
    TorchAttribute(
        "nn_module_stack stack_trace example_value",
        "node.meta",
        "ir/history.py ir/spans.py ir/text.py",
        "the module and line of a node; values of Dynamo's graph",
    ),
    TorchAttribute(
        "node.hint node.expr", "a SymInt", "ir/liveness.py cost/symbols.py", "its value and expression, without a guard"
    ),
)
