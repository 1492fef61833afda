"""Scenarios of the tests of other implementations, and the test of each here: `docs/fsdp2_tests.md`.

A scenario names its tests as `file::test`, below `tests/`; where it has none, it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Held(NamedTuple):
    """One scenario: the tests that hold it, or why there is none."""

    tests: tuple[str, ...]
    why: str = ""


def by(*tests: str) -> Held:
    return Held(tests)


def none(why: str) -> Held:
    return Held((), why)


UNITS, PARAMETERS, GRAPHS, LOOP = (
    f"numerics/test_{name}.py::test_" for name in ("units", "parameters", "graphs", "loop")
)
LIFE, ACCUMULATION, REPLICAS = (f"numerics/test_{name}.py::test_" for name in ("lifecycle", "accumulation", "replicas"))
SHARD, MODELS = "sharding/test_shard_module.py::test_", "attacks/test_random_models.py::test_"
MIXED, PREFETCHER = "numerics/test_mixed_cases.py::test_", "runtime/test_prefetcher.py::test_"
MEMORY, FROZEN = "numerics/test_graph_memory.py::test_", "numerics/test_frozen.py::test_"
WHOLE_MESH = "numerics/test_whole_mesh.py::test_"
PIPELINES = "numerics/test_pipelining.py::test_"
DCP, HOIST = "state/test_torch_dcp.py::test_", "passes/test_hoist_prefetch.py::test_"

FSDP2: Mapping[str, Mapping[str, Held]] = {
    "Sharding a module": {
        "a wrong mesh, a rank outside it": by(
            f"{SHARD}says_what_is_wrong_with_the_axes_of_a_mesh",
            f"{SHARD}refuses_a_mesh_on_a_device_that_is_not_here",
            f"{SHARD}refuses_a_mesh_without_this_rank",
        ),
        "no process group yet": by(
            "numerics/test_one_rank.py::test_fully_shard_makes_a_group_of_one_rank_where_there_is_none"
        ),
        "units inside units": by(
            f"{UNITS}trains_with_units_inside_units", f"{SHARD}refuses_a_unit_inside_a_unit_that_is_sharded_already"
        ),
        "a list of modules as one group": by(f"{UNITS}trains_with_a_list_of_modules_as_one_unit"),
        "uneven rows, fewer rows than ranks": by(
            f"{PARAMETERS}trains_uneven_and_tiny_parameters", f"{PARAMETERS}trains_units_with_fewer_rows_than_ranks"
        ),
        "scalars are refused": none("fxshard replicates them"),
        "meta device, initialised after sharding": by(
            f"{LIFE}initialises_a_model_that_was_sharded_on_the_meta_device",
            f"{LIFE}initialises_at_random_the_values_that_fsdp2_draws",
        ),
        "a forward on the meta device": by(f"{SHARD}asks_to_initialise_a_model_that_is_still_on_the_meta_device"),
        "a module sharded twice, a container": by(
            f"{SHARD}refuses_a_module_that_is_sharded_already", f"{SHARD}refuses"
        ),
        "ignored parameters stay whole": by(
            f"{PARAMETERS}leaves_ignored_parameters_to_their_rank", f"{MODELS}a_graph_may_read_ignored_parameters_alone"
        ),
        "a deep copy is refused": by("sharding/test_sharded_module.py::test_refuses_to_copy_a_sharded_module"),
        "the class of a module": by("sharding/test_adopt.py::test_gives_every_module_its_own_class"),
        "`shard_placement_fn`": by("numerics/test_placements.py::test_trains_what_is_cut_along_other_dimensions"),
        "tensor subclasses with all_gather hooks": by(
            "numerics/test_extensions.py::test_trains_as_fsdp2_with_the_same_subclass"
        ),
    },
    "Training in parity": {
        "one group": by(f"{UNITS}trains_with_the_root_as_the_only_unit"),
        "a group per block, `reshard_after_forward`": by(
            f"{UNITS}trains_compiled_as_a_whole", f"{UNITS}trains_in_eager_mode_without_any_compile"
        ),
        "blocks compiled one by one": by(f"{UNITS}trains_with_each_block_compiled_alone"),
        "one rank": by(f"{UNITS}trains_on_a_mesh_of_one_rank"),
        "a module called several times": by(f"{PARAMETERS}reduces_the_parameters_of_a_module_called_twice_once"),
        "several forwards before a backward": by(
            f"{GRAPHS}runs_two_forwards_before_two_backwards", f"{GRAPHS}runs_one_backward_through_two_forwards"
        ),
        "training a part alone": by(f"{MIXED}trains_a_part_alone_and_then_the_whole"),
        "activation checkpointing": by(f"{GRAPHS}trains_with_activation_checkpointing"),
        "weights tied inside a group": by(f"{PARAMETERS}reduces_a_tied_embedding_and_head_once"),
        "weights tied across groups": by(f"{SHARD}refuses_a_tied_parameter_in_two_units"),
        "HSDP": by(f"{REPLICAS}two_replicas_of_two_ranks_each"),
        "HSDP with uneven rows, frozen units, a scaled loss": by(f"{REPLICAS}two_replicas_of_two_ranks_each_also"),
        "tensor parallelism": by(
            "numerics/test_tensor_parallel.py::test_two_by_two_ranks_train_as_fsdp2",
            "numerics/test_tensor_parallel.py::test_two_by_two_ranks_train_as_fsdp2_also",
        ),
        "expert parallelism, meshes of single parameters": by(
            "numerics/test_experts.py::test_two_by_two_ranks_train_as_fsdp2",
            "numerics/test_experts.py::test_two_by_two_ranks_train_as_fsdp2_also",
            "sharding/test_meshes.py::test_there_is_a_unit_for_each_mesh_and_that_of_most_ranks_comes_first",
        ),
        "DTensors on all mesh axes (`dp_mesh_dims`)": by(
            f"{WHOLE_MESH}trains_as_fsdp2", f"{WHOLE_MESH}trains_as_fsdp2_also"
        ),
        "methods other than forward": by("numerics/test_adopt.py::test_a_registered_method_trains_like_fsdp2s"),
        "a sharded model cast to another dtype": by(f"{LIFE}converts_a_sharded_model_to_another_dtype"),
        "resharding between forward and backward": by(f"{UNITS}keeps_no_full_parameter_or_gradient_after_a_step"),
        "an optimizer on its own stream": by(
            f"{PREFETCHER}an_event_after_the_optimizer_holds_for_one_forward_and_changes_nothing_on_the_cpu",
            "gpu/test_streams.py::test_an_optimizer_on_a_stream_of_its_own_changes_nothing",
        ),
        "random combinations": by(f"{MODELS}many_random_models_train_as_unsharded"),
    },
    "Autograd": {
        "an unused output": by(f"{MIXED}an_output_that_the_loss_leaves_out_gives_zeros_and_changes_nothing_else"),
        "ranks that use different parameters": by(
            "numerics/test_unused.py::test_ranks_that_take_other_branches_reduce_as_fsdp2",
            "numerics/test_unused.py::test_graphs_of_other_branches_reduce_as_fsdp2",
        ),
        "an unused module": by(f"{UNITS}trains_a_model_that_skips_a_unit_in_some_steps"),
        "dicts, lists and tuples as inputs and outputs": by(f"{GRAPHS}trains_with_dicts_as_inputs_and_outputs"),
        "post-accumulate hooks": by(
            f"{PARAMETERS}runs_the_post_accumulate_hooks_of_sharded_parameters_once_per_backward"
        ),
        "an optimizer step in these hooks": by(f"{MIXED}steps_in_backward_by_hooks_of_parameters"),
        "frozen first layers": by(f"{FROZEN}gradual_unfreezing_trains_what_is_unfrozen"),
    },
    "Frozen parameters": {
        "in a group with trained parameters": by(f"{PARAMETERS}leaves_frozen_parameters_alone"),
        "whole groups": by(f"{FROZEN}a_frozen_graph_that_accumulates_reduces_nothing_and_passes_gradients_on"),
        "changed between steps": by(
            f"{PARAMETERS}follows_requires_grad_changed_between_steps", f"{MODELS}many_random_models_train_as_unsharded"
        ),
    },
    "Gradient accumulation": {
        "`set_requires_gradient_sync`, for all modules or some": by(
            f"{ACCUMULATION}reduces_and_clips_in_the_last_microbatch", f"{ACCUMULATION}follows_a_pattern_that_changes"
        ),
        "without the all_reduce over replicas": by(f"{REPLICAS}replicas_of_one_rank_each"),
        "without resharding after backward": by("numerics/test_unsharded_cache.py::test_gathers_once_per_step"),
        "gathers and reductions of pipeline microbatches": by(
            f"{PIPELINES}two_stages_of_two_ranks_train_as_fsdp2",
            f"{PIPELINES}every_schedule_gathers_and_reduces_once_per_step",
        ),
        "every pipeline schedule, split backwards": by(f"{PIPELINES}every_schedule_trains_as_fsdp2"),
        "clipping, evaluation, states, HSDP and tensor parallelism in a pipeline": by(
            f"{PIPELINES}two_stages_of_two_ranks_also"
        ),
        "with mixed precision": by(f"{ACCUMULATION}accumulates_in_the_reduce_dtype"),
        "with hooks on gradients": by("numerics/test_accumulation_order.py::test_hooks_see_the_whole_gradient_once"),
    },
    "Mixed precision": {
        "dtypes of compute and of the reduction": by(f"{GRAPHS}trains_in_mixed_precision"),
        "inputs and outputs are cast": by(f"{GRAPHS}returns_the_output_dtype_of_the_policy"),
        "parts in another dtype": by("numerics/test_buckets.py::test_gathers_a_unit_of_two_dtypes"),
        "how gradients are divided": by(f"{GRAPHS}divides_gradients_as_fsdp2_does_in_each_dtype"),
        "a scaled loss": by(
            f"{LOOP}skips_on_all_ranks_the_step_whose_scaled_gradients_overflow_on_one",
            f"{MIXED}scales_the_loss_of_a_model_that_computes_in_fp16",
        ),
    },
    "Communication": {
        "how many collectives a step launches": by(f"{MEMORY}launches_one_gather_and_one_reduction_per_unit"),
        "values of an all_gather and a reduction, by dtype": by(
            "passes/test_insert_collectives.py::test_computes_what_unsharded_training_computes"
        ),
        "the order of prefetch, also with lists": by(
            "numerics/test_fsdp2_order.py::test_lists_give_the_order_of_fsdp2", f"{HOIST}launches_one_ahead"
        ),
        "prefetch of a module called twice or unused": by(
            f"{HOIST}launches_the_next_call_of_a_unit_that_is_called_twice",
            f"{PREFETCHER}drops_what_the_model_does_not_request",
        ),
        "`unshard(async_op=True)`": by(f"{PREFETCHER}unshard_launches_ahead_of_the_call"),
        "`unshard` and `reshard` before the first call": by(
            f"{PREFETCHER}unshard_of_what_no_graph_requested_launches_nothing",
            f"{PREFETCHER}reshard_frees_what_was_asked_for",
        ),
        "another divisor, sums alone": by(
            "sharding/test_fsdp2_settings.py::test_settings_of_the_division_are_part_of_what_a_graph_is_compiled_for"
        ),
        "buffers of the process group's allocator": none("Inductor allocates: docs/fsdp2.md"),
        "collectives of the caller's own": by("numerics/test_comms.py::test_trains_as_fsdp2_with_the_same_object"),
        "compute hides communication": by(
            "gpu/test_streams.py::test_all_gathers_and_reductions_run_beside_the_products_of_their_neighbours"
        ),
    },
    "Memory": {
        "the peak of a step": by(
            f"{MEMORY}keeps_no_more_unsharded_than_a_unit_its_copy_the_prefetched_ones_and_the_root",
            "gpu/test_memory.py::test_compiled_code_takes_no_more_than_its_explanation_says",
        ),
        "a deleted model frees its memory": by(f"{PREFETCHER}a_model_that_is_dropped_leaves_no_collective_unwaited"),
    },
    "State and clipping": {
        "a sharded state dict": by(f"{LIFE}continues_from_a_distributed_checkpoint"),
        "a full state dict on rank 0": by(f"{DCP}a_full_state_dict_is_that_of_the_unsharded_model"),
        "loads between steps": by(f"{LIFE}loads_a_state_dict_between_steps"),
        "a load into the meta device": by(
            f"{LIFE}loads_a_full_state_dict_into_a_model_that_was_sharded_on_the_meta_device"
        ),
        "on another number of ranks": by(f"{DCP}any_number_of_ranks_loads_what_any_number_has_saved"),
        "gradient clipping": by(f"{LOOP}clips_the_norm_of_gradients"),
        "CPU offload": by("numerics/test_offload.py::test_trains_as_without"),
    },
}

DEEPCOMPILE: Mapping[str, Held] = {
    "a compiled step equals the eager one, by dtype": by(
        "numerics/test_inductor.py::test_compiled_code_trains_with",
        "numerics/test_inductor.py::test_compiled_code_trains_in_mixed_precision",
    ),
    "parameters that need padding": by(
        "passes/test_insert_collectives.py::test_trims_the_padding_rows_of_an_uneven_parameter"
    ),
    "several graphs of one model": by(f"{GRAPHS}trains_across_a_graph_break"),
    "prefetch within a memory budget": by("passes/test_hoist_prefetch_auto.py::test_stops_where_the_budget_ends"),
    "parameters that stay gathered": by(
        "numerics/test_unsharded_cache.py::test_keeps_what_saves_most_within_the_budget"
    ),
    "autocast": by(f"{GRAPHS}trains_under_bf16_autocast"),
    "time and memory per node": by("cost/test_stats.py::test_backward_of_two_layers"),
    "optimizer state on the CPU": by(
        "numerics/test_offload.py::test_gradients_and_optimizer_state_are_where_the_shards_are"
    ),
    "activations on the CPU, sequence parallelism": none("not supported"),
}

FAIRSCALE: Mapping[str, Held] = {
    "nested wraps, a transformer, autocast": by(
        f"{UNITS}trains_with_units_inside_units",
        "numerics/test_hugging_face.py::test_trains_llama",
        f"{GRAPHS}trains_under_bf16_autocast",
    ),
    "ranks that are late": by(
        "runtime/test_rank_mismatch.py::test_ranks_that_compile_longer_than_the_timeout_of_the_group_meet"
    ),
    "experts on some of the ranks": by(
        "runtime/test_shared_graphs.py::test_ranks_that_give_experts_different_numbers_of_rows_train_on"
    ),
    "weights frozen before or after wrapping": by(f"{PARAMETERS}follows_requires_grad_changed_between_steps"),
    "a weight that two modules share": by(
        f"{PARAMETERS}reduces_a_tied_embedding_and_head_once",
        "sharding/test_stale_holders.py::test_refuses_a_parameter_that_another_model_shares",
    ),
    "fewer elements than ranks": by(f"{PARAMETERS}trains_units_with_fewer_rows_than_ranks"),
    "nested `no_sync`": by(f"{ACCUMULATION}no_sync_holds_for_what_runs_inside"),
    "two forwards, then two backwards": by(f"{GRAPHS}runs_two_forwards_before_two_backwards"),
    "parameters read and written between steps": by(f"{LIFE}sees_what_is_written_through_data"),
    "optimizer state for another number of ranks": by(
        "state/test_checkpoint.py::test_any_number_of_ranks_loads_what_any_number_has_saved"
    ),
    "state dicts before and after forward": by(
        "state/test_model_state.py::test_is_the_state_dict_of_the_unsharded_module"
    ),
    "convolutions, batch norm, recurrent layers": by(
        f"{PARAMETERS}keeps_batch_norm_statistics_per_rank",
        f"{PARAMETERS}lstm_works_in_eager_mode",
        f"{MODELS}many_random_models_train_as_unsharded",
    ),
    "initialisers through `apply`": by(f"{LIFE}initialises_a_model_that_was_sharded_on_the_meta_device"),
    "a pickled model": by("sharding/test_sharded_module.py::test_refuses_to_copy_a_sharded_module"),
    "parameters or state on the CPU": by("numerics/test_offload.py::test_trains_as_without"),
    "offload to a disk": none("not supported"),
}
