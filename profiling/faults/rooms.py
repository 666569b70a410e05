"""Which files of the library `mutations.py` breaks, room by room, and the tests that should notice."""

from typing import NamedTuple


class Room(NamedTuple):
    """Files that are broken, each with the tests that should notice; `wider`: those that are asked after them."""

    tests: dict[str, tuple[str, ...]]
    wider: tuple[str, ...] = ()


def _each(files: tuple[str, ...], *tests: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(files, tests)


ROOMS = {
    "token": Room(_each(("tensor_array/gradient.py", "tensor_array/buffer.py"), "tests/tensor_array")),
    "undo": Room(
        _each(
            ("loop/checkpoint/array_versions.py", "loop/checkpoint/writes.py"),
            "tests/checkpoint/test_replay.py",
            "tests/checkpoint/test_replay_world.py",
            "tests/loop/test_loop_row_arrays.py",
            "tests/loop/test_loop_in_place.py",
        ),
        ("tests/checkpoint", "tests/loop"),
    ),
    "schedules": Room(
        _each(
            ("schedule/spans.py", "schedule/online.py", "schedule/tables.py", "schedule/hierarchy.py"),
            "tests/checkpoint/test_schedule.py",
            "tests/checkpoint/test_schedule_online.py",
            "tests/checkpoint/test_schedule_hierarchy.py",
        ),
    ),
    "partition": Room(
        _each(
            ("compiler/divide/partition.py", "compiler/step.py"),
            "tests/compiled/test_compiled_values.py",
            "tests/compiled/test_compiled_explain.py",
        ),
        ("tests/compiled",),
    ),
    "compiled": Room(
        {
            "loop/compiled/run/array_memory.py": (
                "tests/compiled/test_compiled_arrays.py",
                "tests/compiled/test_compiled_array_checkpoints.py",
            ),
            "loop/compiled/run/open_end.py": ("tests/compiled/test_compiled_open_end.py",),
            "loop/compiled/run/python_condition.py": ("tests/compiled/test_compiled_conditions.py",),
        },
        ("tests/compiled",),
    ),
    "divide": Room(
        {
            "compiler/divide/saving.py": (
                "tests/compiled/test_compiled_discontinuous.py",
                "tests/compiled/test_compiled_explain.py",
            ),
            "compiler/divide/sums.py": (
                "tests/compiled/test_compiled_sums.py",
                "tests/compiled/test_compiled_values.py",
            ),
            "compiler/divide/all_steps.py": (
                "tests/compiled/test_compiled_values.py",
                "tests/compiler/test_operations.py",
            ),
        },
        ("tests/compiled",),
    ),
    "graph": Room(
        _each(
            ("compiler/graph/simplify.py", "compiler/graph/backward_step.py", "compiler/graph/capture.py"),
            "tests/compiled/test_compiled_values.py",
            "tests/compiled/test_compiled_missing.py",
            "tests/compiled/test_compiled_inputs.py",
        ),
        ("tests/compiled",),
    ),
    "emitter": Room(
        _each(
            (
                *("compiler/emitter/lower/movement.py", "compiler/emitter/lower/indexing.py"),
                *(
                    "compiler/emitter/write/fuse.py",
                    "compiler/emitter/write/nest.py",
                    "compiler/emitter/write/row_shares.py",
                ),
            ),
            "tests/compiler/test_operations.py",
            "tests/compiler/test_emitter_loops.py",
        ),
        ("tests/compiler", "tests/compiled"),
    ),
    "loops": Room(
        {
            "loop/rows_scan.py": ("tests/loop/test_loop_rows_ys.py",),
            "loop/attributes.py": ("tests/loop/test_module_state.py",),
            "loop/first_step.py": ("tests/loop/test_first_only.py",),
            "loop/checkpoint/adjoint.py": ("tests/loop/test_fixed_point.py",),
        },
        ("tests/loop", "tests/compiled"),
    ),
    "packed": Room(
        {
            "packed/rows/segments.py": ("tests/packed/rows/test_packed_ragged.py",),
            "packed/table/autograd.py": ("tests/packed/table/test_packed_autograd.py",),
            "packed/rows/windows.py": (
                "tests/packed/time/test_packed_time.py",
                "tests/packed/views/test_packed_channels.py",
            ),
        },
        ("tests/packed",),
    ),
    "attention": Room(
        {
            "attention/strips.py": tuple(
                f"tests/attention/test_{name}.py" for name in ("attention", "attention_scores", "trees")
            ),
            "kernels/scores.py": ("tests/attention/test_attention_scores.py", "tests/attention/test_past.py"),
        },
        ("tests/attention",),
    ),
    "views": Room(
        {
            **_each(
                ("packed/views/reordered.py", "packed/operations/shape.py", "packed/operations/regroup.py"),
                *(f"tests/packed/{name}.py" for name in ("views/test_packed_heads", "views/test_packed_time_first")),
                *("tests/packed/time/test_packed_images.py", "tests/packed/table/test_packed_operations.py"),
            ),
            **_each(
                ("packed/scores/scores.py", "packed/scores/score_ops.py"),
                *("tests/packed/scores/test_packed_scores.py", "tests/packed/scores/test_packed_relative.py"),
            ),
            **_each(("packed/rows/size.py", "packed/by_size.py"), "tests/packed/rows/test_packed_size.py"),
            "packed/operations/joins.py": ("tests/packed/operations/test_packed_joins.py",),
        },
        ("tests/packed", "tests/attention/test_sdpa_packed.py"),
    ),
    "masks": Room(
        {
            **_each(
                ("attention/masks.py", "attention/sdpa.py", "attention/multihead.py"),
                "tests/attention/test_sdpa_packed.py",
            ),
            "attention/one_query.py": ("tests/attention/test_one_query.py",),
        },
        ("tests/attention", "tests/packed"),
    ),
    "lanes": Room(
        _each(
            tuple(
                f"compiler/emitter/device/{name}.py"
                for name in ("kernel_body", "kernel_plan", "lane_product", "lane_walk", "lanes", "waits", "device_math")
            ),
            *(f"tests/compiler/test_device_{name}.py" for name in ("text", "waits", "math", "ptx")),
        ),
        ("tests/compiler",),
    ),
    "graphs": Room(
        _each(
            (
                *(f"compiler/targets/graphs/{name}.py" for name in ("graph_core", "recorded", "graph_target")),
                "compiler/targets/proved.py",
            ),
            *("--device", *(f"tests/device/test_{name}.py" for name in ("graphs", "graph_calls", "proved"))),
        ),
        ("--device", "tests/device"),
    ),
    "reads": Room(
        _each(
            (
                *(f"loop/compiled/look/{name}.py" for name in ("values_read", "number_read", "step_number")),
                *(f"loop/compiled/look/{name}.py" for name in ("differentiated", "autograd_calls")),
                "loop/compiled/run/stretches.py",
            ),
            *(f"tests/compiled/test_compiled_{name}.py" for name in ("answers", "functions", "gradients_taken")),
        ),
        ("tests/compiled",),
    ),
    "beam": Room(
        _each(
            ("beam/ancestry.py", "beam/pool.py", "beam/choose.py", "beam/decisions.py"),
            *(f"tests/beam/test_beam{name}.py" for name in ("", "_pool", "_choice", "_history", "_rows", "_ends")),
        ),
        ("tests/beam",),
    ),
    "hf": Room(
        {
            "hf/layers.py": ("tests/hf/test_train_cache.py", "tests/hf/test_looped.py"),
            "hf/hypotheses.py": ("tests/hf/test_search.py", "tests/hf/test_rollout.py"),
        },
        ("tests/hf",),
    ),
    "kernels": Room(
        {
            "kernels/cpu/segment_reductions.py": (
                "tests/kernels/test_kernels.py",
                "tests/kernels/test_kernel_infinities.py",
                "tests/packed/rows/test_packed_ragged.py",
            ),
            "kernels/cpu/edits.py": ("tests/risk/test_edit_distance.py",),
            "kernels/cpu/slots.py": ("tests/kernels/test_kernel_slots.py",),
        },
        ("tests/kernels", "tests/risk", "tests/packed/test_conformance_packed.py"),
    ),
}
