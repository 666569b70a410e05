"""What a sweep leaves: the caller's loop as it was, and a result from which any step can be run again."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop._common.progress import Progress
from tensorloop.loop.checkpoint import node
from tensorloop.loop.checkpoint.array_versions import CapturedArray
from tensorloop.loop.checkpoint.node_outputs import NodeOutputs
from tensorloop.loop.checkpoint.replay import Replay
from tensorloop.loop.checkpoint.sweep import Sweep
from tensorloop.loop.checkpoint.sweep_result import CarryOutput
from tensorloop.loop.checkpoint.writes import Writes
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import store_of

W = torch.tensor([0.5, 2.0], requires_grad=True)


def body(t: int, carry: Tensor, row: list[Any], context: tuple[Any, ...]) -> tuple[Tensor, None]:
    return (carry * W).sin(), None


def loop_and_plan() -> tuple[Loop, tl.Checkpoints, Progress]:
    loop = Loop("fori_loop", body, torch.ones(2, requires_grad=True), 4)
    return loop, tl.Checkpoints(k=2), Progress(False, "fori_loop", None)


def test_the_callers_loop_stays_as_it_was() -> None:
    loop, plan, progress = loop_and_plan()
    before = dict(vars(loop))
    ended, _ = node.run(loop, plan, 4, progress)
    assert {name for name, value in vars(loop).items() if value is not before[name]} == set()
    assert (loop.taken, ended.taken) == (0, 4)


def test_steps_are_run_again_from_a_result_that_does_not_change() -> None:
    loop, plan, progress = loop_and_plan()
    sweep = Sweep(loop, plan, 4)
    state = sweep.run(progress)
    swept = sweep.result(NodeOutputs(sweep, state).places)
    with pytest.raises(FrozenInstanceError):
        swept.taken = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert (swept.taken, swept.outputs, sorted(swept.snapshots.by_step)) == (4, [CarryOutput(0)], [0, 2])
    assert [id(x) for x in swept.inputs.all] == [id(loop.init[0]), id(W)]

    replay = Replay(swept, shown=False)
    with replay.as_then():
        state = replay.advance(2, 3, replay.restore(2))
        step = replay.reverse(3, 4, state)
        found = torch.autograd.grad(step.carry[0].sum(), [step.inputs[0][1], W])
    with torch.no_grad():
        c: Any = torch.ones(2)
        for t in range(3):
            c, _ = body(t, c, [], ())
    c.requires_grad_()
    assert torch.equal(state[0].values, c)
    expected = torch.autograd.grad(body(3, c, [], ())[0].sum(), [c, W])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_values_before_a_write_are_held_for_what_outlives_its_step():
    writes, kept, own, unseen = Writes(), torch.zeros(3), torch.zeros(3), torch.zeros(3)
    writes.before([kept, own], False, lambda x: False, {id(kept), id(own)})
    writes.before([unseen], True, lambda x: x is unseen, ())
    for x in (kept, own, unseen):
        x.add_(1)
    assert {(id(x), without_version) for x, without_version in writes.tensors()} == {
        (id(kept), False),
        (id(own), False),
        (id(unseen), True),
    }
    del own, x
    writes.settle()
    assert writes.fresh == {}  # else each step would leave a copy
    assert set(writes.changed) == {id(kept), id(unseen)}
    writes.restore({id(kept): torch.full((3,), 7.0)})
    assert kept.tolist() == [7.0] * 3
    assert not unseen.any()


def test_an_array_closed_over_is_held_without_the_rows_read_before():
    array = tl.TensorArray.unstack(torch.ones(3, 2, requires_grad=True))
    reads = [array[i] for i in range(3)]
    buffer = store_of(array)
    assert isinstance(buffer, Buffer)
    assert buffer.rows is not None
    captured = CapturedArray(buffer, "scan")
    assert captured.twin.rows is None
    captured.enter()
    assert buffer.rows is None
    captured.leave()
    assert buffer.rows is not None
    assert torch.equal(torch.stack(reads), array.stack())
