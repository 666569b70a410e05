"""Tests that are not for a device, each with the reason. They run all the same, and must fail: but for `NOT_RUN`.

A test is its file in `tests/` and its name, or the file alone; in brackets, what a case's id must have to be excluded.
"""

GRAPHS = "torch.compile cannot trace what a loop's classes ask of torch's while a default device is set, be it the CPU"
PIECES = "torch.compile breaks its graph within, and a piece that it then runs has a tensor of the CPU: not understood"
KERNELS = "torch has these kernels for CUDA alone"
NUMPY = "NumPy has no arrays on a device"
SPARSE = "the pretended device has no sparse tensors"
NESTED = "the pretended device has no nested tensors"
DEFAULT = "torch's own checkpoint forgets the default device in backward"
DRIVER = "the pretended device has a driver"
DEADLOCK = "it stops a backward until another has begun, and a device has one thread for all"
FORKED = "processes that were forked cannot use a device"

EXCLUDED = {
    DRIVER: ("compiler/test_ptx_driver.py::test_without_a_driver_there_is_no_device",),
    KERNELS: (
        "attention/test_attention.py::test_dtypes[dtype1]",
        "attention/test_attention.py::test_dtypes[dtype2]",
    ),
    NUMPY: ("packed/test_packed_advice.py::test_what_a_message_says_to_write_runs[p.numpy()]",),
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
    NESTED: ("packed/test_packed_lens.py::test_a_default_device_other_than_that_of_the_values[from_nested]",),
    DEFAULT: ("tensor_array/test_tensor_array_transforms.py::test_inside_torch_checkpoint[True]",),
    PIECES: ("packed/test_packed_ops.py::test_compiled_code_packs_and_reduces",),
    GRAPHS: (
        "packed/test_packed_static.py::test_a_compiled_model_has_no_breaks_and_is_compiled_once[aot_eager]",
        "loop/test_loop_limits.py::test_an_associative_scan_is_traced_as_one_graph",
        "loop/test_associative_scan_gradients.py::test_torch_compile_takes_it_as_one_graph",
        "loop/test_compat_rules.py::test_an_associative_scan_in_one_graph[True]",
        "loop/test_linear_recurrence.py::test_torch_compile_takes_it_as_one_graph",
    ),
}

# They would take the run with them.
NOT_RUN = {
    DEADLOCK: ("checkpoint/test_loop_limits_replay.py::test_hooks_are_silent_for_another_thread_while_a_replay_lasts",),
    GRAPHS: ("packed/test_packed_compile.py",),
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
