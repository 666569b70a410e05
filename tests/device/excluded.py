"""Tests that are not for a device, each with the reason. They run all the same, and must fail: but for `NOT_RUN`.

A test is its file in `tests/` and its name, or the file alone; in brackets, what a case's id must have to be excluded.
"""

TEXT = "the text that it expects names the CPU"
EAGER = "loops on a device are not compiled"
GRAPHS = "torch.compile wants the device's properties, or makes other graphs of a default device"
AUTOCAST = "its autocast is that of the CPU"
PARTS = "torch composes this attention of parts on the pretended device, which keep other tensors"
KERNELS = "torch has these kernels for CUDA alone"
SPARSE = "the pretended device has no sparse tensors"
SPAWN = "a thread that it starts has the CPU as its default device"
HOST = "it is about what lies on the CPU"
BYTES = "it counts exact bytes, and what is on the device is known to the host besides"
LATE = "the device's thread of autograd lets go of its last task a moment after backward"
DEADLOCK = "it stops a backward until another has begun, and a device has one thread for all"
FORKED = "processes that were forked cannot use a device"
UNSEEN = "nobody looks at indices on a device: that would wait for it"
DEFAULT = "torch's own checkpoint forgets the default device in backward"
NESTED = "a nested tensor on a device that has none ends the process"

EXCLUDED = {
    PARTS: (
        "attention/test_attention.py::test_an_input_changed_before_backward_is_caught[0]",
        "attention/test_attention.py::test_an_input_changed_before_backward_is_caught[1]",
        "attention/test_attention_memory.py::test_padded_and_masked_keep_the_same",
        "attention/test_attention_memory.py::test_the_peak_of_a_training_step_is_linear[long]",
        "attention/test_attention_memory.py::test_the_peak_of_a_training_step_is_linear[masked]",
        "attention/test_attention_memory.py::test_the_peak_with_scores_changed_is_linear",
    ),
    AUTOCAST: (
        "attention/test_attention.py::test_autocast_casts_and_gradients_come_back_in_the_dtype_of_the_inputs",
        "attention/test_attention_rules.py::test_other_dtypes_and_autocast[dtype0]",
        "attention/test_attention_rules.py::test_other_dtypes_and_autocast[dtype1]",
        "checkpoint/test_loop_limits_replay.py::test_autocast_casts_weights_in_every_step",
        "checkpoint/test_replay_world.py::test_autocast_is_set_again",
        "tensor_array/test_conformance_arrays.py::test_autocast_and_hooks_in_a_body_that_appends",
        "tensor_array/test_tensor_array_transforms.py::test_autocast_and_anomaly_mode",
    ),
    KERNELS: (
        "attention/test_attention.py::test_dtypes[dtype1]",
        "attention/test_attention.py::test_dtypes[dtype2]",
    ),
    HOST: (
        "attention/test_attention.py::test_the_output_has_the_rows_of_the_queries",
        "attention/test_attention_scores.py::test_dropout_is_the_same_in_backward_and_in_every_derivative",
        "checkpoint/test_transfers.py::test_on_the_cpu_a_copy_is_a_copy[[]]",
        "checkpoint/test_transfers.py::test_on_the_cpu_a_copy_is_a_copy[empty]",
        "tensor_array/test_tensor_array_copies.py::test_to_where_it_is_gives_itself",
        "tensor_array/test_tensor_array_facts.py::test_indices_that_are_not_on_the_device_are_checked_and_grow_the_array",
    ),
    TEXT: (
        "attention/test_attention_errors.py::test_devices_that_differ",
        "attention/test_attention_errors.py::test_masks_that_cannot_be_taken",
        "attention/test_attention_errors.py::test_options_that_are_none[q is on cpu]",
        "attention/test_attention_errors.py::test_relative_positions_that_do_not_fit",
        "attention/test_attention_errors.py::test_rules_that_are_none[q is on cpu]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff3]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff5]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff6]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff7]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff8]",
        "loop/test_associative_scan.py::test_all_that_differs_in_what_fn_returns_is_listed[diff9]",
        "loop/test_compat_errors.py::test_errors_speak_of_torch_s_arguments[one thing]",
        "loop/test_compat_errors.py::test_errors_speak_of_torch_s_arguments[a carry that grows]",
        "loop/test_compat_errors.py::test_errors_speak_of_torch_s_arguments[an int that becomes a tensor]",
        "loop/test_compat_errors.py::test_errors_speak_of_torch_s_arguments[a condition of rows]",
        "loop/test_compat_errors.py::test_errors_speak_of_torch_s_arguments[an element that shrinks]",
        "loop/test_loop_errors.py::test_a_body_that_returns_no_pair[-tensor-]",
        "loop/test_loop_errors.py::test_a_carry_is_called_what_the_body_calls_it",
        "loop/test_loop_errors.py::test_a_lost_key_stands_under_the_users_name",
        "loop/test_loop_errors.py::test_an_init_that_broadcasts_against_x_is_caught",
        "loop/test_loop_errors.py::test_another_structure_names_both_and_the_keys_that_differ",
        "tensor_array/test_tensor_array_copies.py::test_a_copy_is_equal_and_goes_its_own_way",
        "tensor_array/test_tensor_array_copies.py::test_to_another_device",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[append device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[extend device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[gather device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[rows device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[scatter at device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[set device]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[write device]",
        "tensor_array/test_tensor_array_errors.py::test_given_facts_hold_from_the_first_write['meta'}]",
        "tensor_array/test_tensor_array_facts.py::test_facts_are_unknown_until_given_or_written",
        "tensor_array/test_tensor_array_facts.py::test_facts_given_are_known_at_once",
        "tensor_array/test_tensor_array_facts.py::test_repr_tells_the_facts",
    ),
    SPARSE: (
        "beam/test_beam_errors.py::test_log_probs_that_are_not_dense",
        "checkpoint/test_replay_kinds.py::test_a_sparse_tensor_in_the_carry",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[extend sparse]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[rows sparse]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[scatter sparse]",
        "tensor_array/test_tensor_array_errors.py::test_constructors_refuse[words12]",
        "tensor_array/test_tensor_array_errors.py::test_empty_arrays_refuse_and_stay_empty[[sparse]",
        "tensor_array/test_tensor_array_gradients.py::test_a_sparse_gradient_of_a_read",
    ),
    EAGER: (
        "checkpoint/test_conformance_hooks.py::test_a_hook_on_a_result_gets_what_comes_from_outside[compiled-all]",
        "checkpoint/test_replay_world.py::test_a_capture_changed_before_backward_is_an_error[compiled]",
        "checkpoint/test_replay_world.py::test_a_name_bound_to_another_tensor_before_backward_is_an_error[compiled]",
        "checkpoint/test_replay_world.py::test_a_replay_of_another_shape_is_named[compiled]",
        "checkpoint/test_replay_world.py::test_a_step_that_does_not_repeat_itself_is_named[compiled]",
        "checkpoint/test_replay_world.py::test_an_exception_in_a_replay_leaves_everything_usable[compiled]",
        "checkpoint/test_replay_world.py::test_init_or_xs_changed_before_backward_is_an_error[compiled]",
        "checkpoint/test_schedule_hierarchy.py::test_a_schedule_of_the_users_says_where[strict]",
        "checkpoint/test_schedule_hierarchy.py::test_compiled_loops_too",
    ),
    SPAWN: (
        "checkpoint/test_conformance_hooks.py::test_loops_in_threads_share_their_weights",
        "checkpoint/test_conformance_hooks.py::test_what_a_thread_of_the_body_makes_is_part_of_the_step",
        "checkpoint/test_loop_limits_replay.py::test_an_array_is_read_by_checkpointed_loops_of_one_thread_at_a_time",
        "tensor_array/test_tensor_array_lifetime.py::test_threads_run_backward_over_different_graphs",
    ),
    BYTES: ("checkpoint/test_replay_memory.py::test_rows_that_leave_the_batch_hold_nothing_more",),
    GRAPHS: (
        "loop/test_associative_scan_gradients.py::test_torch_compile_takes_it_as_one_graph",
        "loop/test_compat_rules.py::test_an_associative_scan_in_one_graph",
        "loop/test_linear_recurrence.py::test_torch_compile_takes_it_as_one_graph",
        "loop/test_loop_limits.py::test_an_associative_scan_is_traced_as_one_graph",
        "tensor_array/test_tensor_array_transforms.py::test_fullgraph_compilation_says_why_it_cannot",
        "tensor_array/test_tensor_array_transforms.py::test_torch_compile_gives_right_results",
    ),
    UNSEEN: (
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[gather above in 2-d]",
        "tensor_array/test_tensor_array_errors.py::test_holes_are_refused_and_stay_holes[gather negative]",
    ),
    DEFAULT: ("tensor_array/test_tensor_array_transforms.py::test_inside_torch_checkpoint[True]",),
}

# They would take the run with them, or now and then pass.
NOT_RUN = {
    LATE: (
        "beam/test_beam_errors.py::test_an_interrupted_search_leaves_nothing_behind",
        "loop/test_associative_chunks.py::test_one_element_a_chunk_is_kept",
    ),
    DEADLOCK: ("checkpoint/test_loop_limits_replay.py::test_hooks_are_silent_for_another_thread_while_a_replay_lasts",),
    FORKED: ("packed/test_packed.py::test_collate_in_a_data_loader",),
    NESTED: ("packed/test_packed.py::test_nested_tensors",),
    GRAPHS: ("packed/test_packed_compile.py",),
}


def reason(test: str) -> tuple[str, bool] | None:
    """Why a test, named as pytest names it, is excluded, and whether it runs; None where it is not."""
    here, _, ids = test.removeprefix("tests/").partition("[")
    for table, run in ((EXCLUDED, True), (NOT_RUN, False)):
        for why, names in table.items():
            for name in names:
                where, _, case = name.partition("[")
                if where in (here, here.partition("::")[0]) and case.removesuffix("]") in "[" + ids:
                    return why, run
    return None
