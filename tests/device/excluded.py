"""Tests that are not for a device, each with the reason. They run all the same, and must fail: but for `NOT_RUN`.

A test is its file in `tests/` and its name, or the file alone; in brackets, what a case's id must have to be excluded.
"""

GRAPHS = "torch.compile cannot trace what a loop's classes ask of torch's while a default device is set, be it the CPU"
PIECES = "torch.compile runs code made for lengths on the device with lengths on the CPU: no guard has their device"
KERNELS = "torch has these kernels for CUDA alone"
NUMPY = "NumPy has no arrays on a device"
SPARSE = "the pretended device has no sparse tensors"
NESTED = "the pretended device has no nested tensors"
DEFAULT = "torch's own checkpoint forgets the default device in backward"
NATIVE = "it looks into what a loop becomes on the CPU: machine code, its threads, its cache"
EXPORTED = "in a graph of torch.compile only loops on the CPU are compiled"
JOINT = "a device draws and compares in one kernel, by numbers that nothing else draws: such a loop stays eager"
THERE = "its tensors come from the CPU, whatever the default device"
LOW = "autocast of a device casts to other dtypes, or to kernels that only CUDA has"
THREAD = "backward runs in a thread of its device, where this tool sees no call from Python"
TEXT = "it expects what torch says on the CPU"
BYTES = "it counts bytes of native loops; torch's operations hold a step's values besides"
DRIVER = "the pretended device has a driver"
META = "torch makes a number on the default device where it takes an operation on the meta device apart"
VECTORS = "torch asks for vectors too where it traces eigvalsh, and of those LAPACK takes a NaN that it refuses without"
LATE = "a search on a device looks at its scores when it ends, where it waits anyway"
DEADLOCK = "it stops a backward until another has begun, and a device has one thread for all"
FORKED = "processes that were forked cannot use a device"

EXCLUDED = {
    NATIVE: (
        "compiled/test_compiled_arrays.py::test_threads_share_rows",
        "compiled/test_compiled_arrays_eager.py::test_elements_of_other_dtypes_fall_back",
        "compiled/test_compiled_calls_out.py::test_a_result_that_is_not_what_was_said_leaves_the_loop_to_torch",
        "compiled/test_compiled_calls_out.py::test_both_loops_are_native_and_explain_says_what_torch_does",
        "compiled/test_compiled_calls_out.py::test_no_step_runs_in_torch_for_a_call",
        "compiled/test_compiled_calls_out.py::test_what_does_not_depend_on_the_carry_is_done_before_the_loop",
        "compiled/test_compiled_complex.py::test_a_transform_is_part_of_the_machine_code",
        "compiled/test_compiled_explain.py::test_a_cache_that_others_can_write_costs_speed_alone",
        "compiled/test_compiled_explain.py::test_a_compiler_that_fails_costs_speed_alone",
        "compiled/test_compiled_explain.py::test_other_products_with_xs_are_hoisted_and_weight_gradients_come_after",
        "compiled/test_compiled_explain.py::test_products_of_small_matrices_are_done_in_the_loop",
        "compiled/test_compiled_explain.py::test_the_picture_of_an_lstm_is_current",
        "compiled/test_compiled_explain.py::test_what_the_emitter_lacks_leaves_the_loop_or_makes_it_eager",
        "compiled/test_compiled_few_steps.py::test_a_long_call_brings_compiled_ones_back_for_good",
        "compiled/test_compiled_few_steps.py::test_explain_says_so",
        "compiled/test_compiled_few_steps.py::test_known_lengths_and_what_is_closed_over_are_apart",
        "compiled/test_compiled_few_steps.py::test_random_numbers_and_gradients_are_the_same",
        "compiled/test_compiled_few_steps.py::test_strict_ones_too",
        "compiled/test_compiled_few_steps.py::test_three_short_calls_are_compiled_and_no_more",
        "compiled/test_compiled_packed.py::test_a_cut_spares_operations_or_bytes[(1, 1000000000000000)]",
        "compiled/test_compiled_pays.py::test_a_loop_goes_by_the_clock",
        "compiled/test_compiled_pays.py::test_a_loop_reads_the_clock_twice_a_call",
        "compiled/test_compiled_pays.py::test_other_python_threads_keep_their_number",
        "compiled/test_compiled_pays.py::test_results_are_the_same_bits_whoever_does_the_parts[lstm]",
        "compiled/test_compiled_pays.py::test_results_are_the_same_bits_whoever_does_the_parts[meeting]",
        "compiled/test_compiled_pays.py::test_torchs_operations_have_one_thread_too_and_only_there",
        "compiled/test_compiled_pays.py::test_where_nothing_is_to_be_decided_no_clock_decides[deterministic]",
        "compiled/test_compiled_pays.py::test_where_nothing_is_to_be_decided_no_clock_decides[one thread]",
        "compiled/test_compiled_pieces.py::test_a_condition_ends_the_loop_at_the_end_of_a_piece_too",
        "compiled/test_compiled_pieces.py::test_an_interrupt_in_backward_comes_once",
        "compiled/test_compiled_pieces.py::test_pieces_give_the_same_bits",
        "compiled/test_compiled_row_arrays.py::test_rows_are_shared_out_among_threads[2]",
        "compiled/test_compiled_row_arrays.py::test_rows_are_shared_out_among_threads[3]",
        "compiled/test_compiled_together.py",
    ),
    BYTES: (
        "compiled/test_compiled_around.py::test_making_a_plan_does_not_count",
        "compiled/test_compiled_checkpoints.py::test_without_checkpoints_the_peak_is_an_eighth_above_the_eager_one",
    ),
    EXPORTED: (
        "compiled/test_compiled_calls_out.py::test_a_loop_with_calls_in_an_exported_graph",
        "compiled/test_compiled_export.py",
        "compiled/test_compiled_reasons.py::test_a_float_attribute_may_change_between_calls_of_a_compiled_module",
        "compiled/test_compiled_reasons.py::test_a_float_that_changes_and_is_no_factor_is_named",
    ),
    JOINT: (
        "compiled/test_compiled_calls_out.py"
        "::test_multinomial_draws_the_eager_loops_numbers_and_chooses_as_torch[put back]",
        *(
            f"compiled/test_compiled_samples.py::test_samples_are_those_of_the_eager_loop[two at once-{case}]"
            for case in ("plain", "no grad", "reverse")
        ),
        "compiled/test_compiled_draws.py::test_numbers_gradients_and_generators_are_those_of_the_eager_loop[bernoulli]",
        *(
            f"compiled/test_compiled_draws.py::test_the_gradient_of_what_numbers_are_drawn_around_is_zero[{name}]"
            for name in ("both", "bernoulli of a capture")
        ),
        *(
            "compiled/test_compiled_draws.py::test_what_can_not_be_drawn_is_an_error_at_its_step"
            f"[probabilities of {name}]"
            for name in ("xs--1.5", "xs-nan", "the carry--1.5", "the carry-nan")
        ),
    ),
    THERE: (
        "compiled/test_compiled_answers.py::test_the_value_of_a_capture_chooses_the_plan_of_a_call[4]",
        "compiled/test_compiled_arrays_eager.py::test_what_falls_back[rows]",
        "compiled/test_compiled_calls.py::test_a_default_device_does_not_reach_inside",
        "compiled/test_compiled_calls_out.py::test_an_error_in_the_backward_has_the_step_too",
        "compiled/test_compiled_calls_out.py::test_an_operator_of_the_users_has_its_registered_gradient",
        "compiled/test_compiled_calls_out.py::test_each_step_calls_once_with_its_own_numbers",
        "compiled/test_compiled_inputs.py::test_tensors_that_memory_does_not_hold[init]",
        "compiled/test_compiled_inputs.py::test_tensors_that_memory_does_not_hold[xs]",
        "compiled/test_compiled_inputs.py::test_tensors_that_memory_does_not_hold[gradient]",
    ),
    LOW: (
        "compiled/test_compiled_autocast.py::test_a_kept_cast_is_no_capture_and_autocast_is_part_of_the_key",
        "compiled/test_compiled_autocast.py::test_checkpoints_under_autocast",
        "compiled/test_compiled_autocast.py::test_loops_under_autocast[lstm]",
        "compiled/test_compiled_autocast.py::test_loops_under_autocast[mixed-half]",
    ),
    THREAD: (
        "attention/test_trees.py::test_bytes_kept_are_those_of_a_token_once",
        "compiled/test_compiled_around.py::test_every_tool_sees_the_compiled_loop",
    ),
    TEXT: ("compiled/test_compiled_arrays_eager.py::test_a_write_behind_the_end_appends_as_in_the_eager_loop",),
    VECTORS: ("compiled/test_compiled_linalg.py::test_numbers_that_are_none_or_very_large[nan-eigh]",),
    LATE: ("beam/test_beam_diagnostics.py::test_raw_logits_are_noticed_before_a_search_that_does_not_end",),
    META: ("loop/test_conformance_loops.py::test_shapes_without_values",),
    DRIVER: ("compiler/test_ptx_driver.py::test_without_a_driver_there_is_no_device",),
    KERNELS: (
        "attention/test_attention.py::test_dtypes[dtype1]",
        "attention/test_attention.py::test_dtypes[dtype2]",
    ),
    NUMPY: (
        "compiled/test_compiled_fallback.py::test_a_body_that_is_more_than_its_operations_runs_eagerly[turns_to_numpy]",
        "packed/table/test_packed_advice.py::test_what_a_message_says_to_write_runs[p.numpy()]",
    ),
    SPARSE: (
        "test_gpu.py::test_which_kernels_can_read_a_tensor",
        "compiled/test_compiled_checks.py::test_sparse_tensors_made_in_the_body_are_refused",
        "beam/test_beam_errors.py::test_log_probs_that_are_not_dense",
        "checkpoint/test_replay_kinds.py::test_a_sparse_tensor_in_the_carry",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[extend sparse]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[rows sparse]",
        "tensor_array/test_tensor_array_errors.py::test_bad_input_is_refused_and_nothing_changes[[scatter sparse]",
        "tensor_array/test_tensor_array_errors.py::test_constructors_refuse[words12]",
        "tensor_array/test_tensor_array_errors.py::test_empty_arrays_refuse_and_stay_empty[[sparse]",
        "tensor_array/test_tensor_array_gradients.py::test_a_sparse_gradient_of_a_read",
    ),
    NESTED: ("packed/rows/test_packed_lens.py::test_a_default_device_other_than_that_of_the_values[from_nested]",),
    DEFAULT: ("tensor_array/test_tensor_array_transforms.py::test_inside_torch_checkpoint[True]",),
    PIECES: ("packed/operations/test_packed_ops.py::test_compiled_code_packs_and_reduces",),
    GRAPHS: (
        "packed/test_packed_returnn.py::test_a_step_traced_once_for_other_lens",
        "packed/static/test_packed_static.py::test_a_compiled_model_has_no_breaks_and_is_compiled_once[aot_eager]",
        "loop/test_loop_limits.py::test_an_associative_scan_is_traced_as_one_graph",
        "loop/test_associative_scan_gradients.py::test_torch_compile_takes_it_as_one_graph",
        "loop/test_compat_rules.py::test_an_associative_scan_in_one_graph[True]",
        "loop/test_linear_recurrence.py::test_torch_compile_takes_it_as_one_graph",
        "loop/test_matrix_recurrence.py::test_torch_compile_takes_it_as_one_graph",
    ),
}

# They would take the run with them.
NOT_RUN = {
    DEADLOCK: ("checkpoint/test_loop_limits_replay.py::test_hooks_are_silent_for_another_thread_while_a_replay_lasts",),
    GRAPHS: ("packed/table/test_packed_compile.py",),
    FORKED: ("packed/test_packed.py::test_collate_in_a_data_loader",),
    NESTED: ("packed/test_packed.py::test_nested_tensors",),
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
