"""Where snapshots go, and how many there are: `Checkpoints(k=, budget=, offload=)`."""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tensorloop import Checkpoints, schedule
from tensorloop.memory import collector_off, saved
from tests.support.loop_cases import randn, rotate
from tests.support.schedule_checks import bytes_of_a_step

B, D = 4, 8
CARRY = B * D * 4


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Files go with the last reference, not when a collector runs."""
    with collector_off():
        yield


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.pt"))


class Body:
    """A step that can be told to fail, and counts."""

    def __init__(self) -> None:
        self.w = (torch.randn(D, D) / math.sqrt(D)).requires_grad_()
        self.calls = 0
        self.fails_at: list[int] = []
        self.seen: list[int] = []
        self.folder: Path | None = None

    def _note(self) -> None:
        if self.folder is not None:
            self.seen.append(len(files(self.folder)))
        if self.calls in self.fails_at:
            raise KeyboardInterrupt

    def __call__(self, i: int, h: Tensor) -> Tensor:
        self.calls += 1  # no plan may do that: the loop is checkpointed also where it is to be compiled
        tl.loop.pure(self._note)()
        return h + torch.tanh(h @ self.w)


def test_snapshots_in_a_folder_hold_no_memory(tmp_path: Path) -> None:
    """What is held is what the loss saves; the same steps are computed as with snapshots in memory."""
    body, x = Body(), torch.randn(B, D, requires_grad=True)

    def loss(plan: Any) -> Tensor:
        return tl.fori_loop(0, 40, body, x, checkpoints=plan).square().sum()

    true = torch.autograd.grad(loss(5), (x, body.w))
    expected, body.calls = body.calls, 0
    body.folder = tmp_path
    assert saved(lambda: loss(Checkpoints(k=5, offload=tmp_path))).bytes == CARRY
    body.calls, body.seen = 0, []
    torch.testing.assert_close(torch.autograd.grad(loss(Checkpoints(k=5, offload=tmp_path)), (x, body.w)), true)
    assert body.calls == expected
    assert max(body.seen) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["dropped", "backward", "retained", "forward fails", "replay fails"])
def test_files_are_removed(end: str, tmp_path: Path) -> None:
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    plan = Checkpoints(k=3, offload=tmp_path)
    if end == "forward fails":
        body.fails_at.append(9)
        with pytest.raises(KeyboardInterrupt):
            tl.fori_loop(0, 20, body, x, checkpoints=plan)
    else:
        out = tl.fori_loop(0, 20, body, x, checkpoints=plan)
        assert len(files(tmp_path)) == 3
        if end == "replay fails":
            body.fails_at.append(body.calls + 7)
            with pytest.raises(KeyboardInterrupt):
                out.sum().backward(retain_graph=True)
            assert len(files(tmp_path)) <= 1, "init may be needed again"
            out.sum().backward()
        elif end != "dropped":
            out.sum().backward(retain_graph=end == "retained")
        del out
    assert list(tmp_path.iterdir()) == []


def test_a_second_backward_from_files(tmp_path: Path) -> None:
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    out = tl.fori_loop(0, 20, body, x, checkpoints=Checkpoints(k=3, offload=tmp_path))
    first = torch.autograd.grad(out.sum(), (x, body.w), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (x, body.w))
    torch.testing.assert_close(first, second)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("offload", ["cpu", "folder"])
def test_values_come_back_as_they_were(offload: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors of any dtype, integers, Python numbers, None and arrays."""
    x = torch.randn(2, dtype=dtype, requires_grad=True)

    def body(i: int, carry: Any) -> Any:
        h, n, k, nothing, array = carry
        return rotate(h) * 1.5 + array[0], n + 1, k + 1, nothing, array.append(h)

    def run(plan: Any) -> Any:
        init: Any = (x, torch.tensor([1, 2]), 3, None, tl.TensorArray.unstack(x[None] * 2))
        h, n, k, nothing, array = tl.fori_loop(0, 9, body, init, checkpoints=plan)
        assert (n.tolist(), k, nothing) == ([10, 11], 12, None)
        return torch.autograd.grad((h.abs().sum() + array.stack().abs().sum()), x)[0]

    plan = Checkpoints(k=3, offload="cpu" if offload == "cpu" else tmp_path)
    torch.testing.assert_close(run(plan), run(None))


# -- a budget becomes a schedule


@pytest.mark.parametrize("carries", [0, 0.9, 2, 6, 40, 200])
@pytest.mark.parametrize("known", [True, False])
def test_a_budget_is_spent_on_residuals_and_carries(carries: float, known: bool) -> None:
    """A step's graph keeps two tensors of the carry's size. Steps of these loops keep nothing in the sweep."""
    body, x = Body(), torch.randn(B, D, requires_grad=True)

    def loss(plan: Any) -> Tensor:
        if known:
            return tl.fori_loop(0, 50, body, x, checkpoints=plan).sum()
        start: Any = (x, 0)
        return tl.while_loop(lambda c: c[1] < 50, lambda c: (body(0, c[0]), c[1] + 1), start, checkpoints=plan)[0].sum()

    least, residuals, _, carry = bytes_of_a_step(loss)
    assert (residuals, carry) == (2 * CARRY, CARRY)
    budget = least + int(carries * CARRY)
    room = budget - least + residuals
    at_once = max(room // (2 * residuals), 1)
    k = max((room - at_once * residuals) // CARRY, 1)
    few = not known and room < 3 * residuals
    plan = schedule.Blocks(schedule.Online(k), at_once) if few else schedule.Budgeted(room, CARRY, residuals)
    body.calls = 0
    torch.autograd.grad(loss(Checkpoints(budget=budget)), (x, body.w))
    calls, body.calls = body.calls, 0
    torch.autograd.grad(loss(plan), (x, body.w))
    assert calls == body.calls


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_more_bytes_are_never_more_steps() -> None:
    found, w = [], torch.eye(D, requires_grad=True)
    for carries in (20, 25, 40, 80, 160, 320):
        x, xs = torch.randn(B, D, requires_grad=True), torch.randn(50, B, D)
        with Products() as products:
            plan = Checkpoints(budget=carries * CARRY)
            h, _ = tl.scan(lambda h, x: ((h @ w).sin() + x, None), x, xs, checkpoints=plan)
            h.sum().backward()
        found.append(products.count - 2 * 50)  # backward has two of a step
    assert found == sorted(found, reverse=True)
    assert found[-1] <= 50 + 3 + 2 + 2  # those that were watched run again, one is tried twice, one reversed once more


def test_a_budget_is_kept(tmp_path: Path) -> None:
    for carries in (14, 18, 30):
        body, x = Body(), torch.randn(B, D, requires_grad=True)

        def loss(body: Body = body, x: Tensor = x, carries: int = carries) -> Tensor:
            return tl.fori_loop(0, 200, body, x, checkpoints=Checkpoints(budget=carries * CARRY)).sum()

        assert saved(loss).bytes <= carries * CARRY


@pytest.mark.parametrize("checkpoints", [2, 3])
def test_offload_of_a_module_on_another_device_is_refused_by_its_path_alone(checkpoints: int, tmp_path: Path) -> None:
    """A folder that is gone when it is needed: the operating system's error, and the loop's step in a note."""
    body, x = Body(), randn(2, 2).float().detach().requires_grad_()
    body.w = torch.eye(2, requires_grad=True)
    folder = tmp_path / "gone"
    folder.mkdir()
    plan = Checkpoints(k=checkpoints, offload=folder)
    folder.rmdir()
    with pytest.raises(OSError, match="gone"):
        tl.fori_loop(0, 9, body, x, checkpoints=plan)
    assert body.calls == 0


# -- what may happen to a folder


def loss_of(body: Body, x: Tensor, offload: Any) -> Tensor:
    return tl.fori_loop(0, 20, body, x, checkpoints=Checkpoints(k=3, offload=offload)).sum()


@pytest.mark.parametrize("moment", ["before the loop", "before backward"])
def test_a_relative_folder_stays_where_it_was(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    plan = Checkpoints(k=3, offload="here")
    if moment == "before the loop":
        monkeypatch.chdir(tmp_path / "there")
    out = tl.fori_loop(0, 20, body, x, checkpoints=plan)
    monkeypatch.chdir(tmp_path / "there")
    assert len(files(tmp_path / "here")) == 3
    out.sum().backward()
    del out
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_a_file_is_seen(place: float, tmp_path: Path) -> None:
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    loss = loss_of(body, x, tmp_path)
    path = sorted(tmp_path.rglob("*.pt"))[-1]
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match="is not what was written there") as caught:
        loss.backward()
    assert str(path) in str(caught.value)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit on the size of files, as a full disk, makes writing fail half way."""
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
        with pytest.raises(OSError, match="could not be written to") as caught:
            loss_of(body, x, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(caught.value)
    assert f"a snapshot of {CARRY} bytes could not be written to {tmp_path}" in message
    assert "File too large" in message
    assert "bytes are free there. Give offload= a folder with more room, or keep fewer carries" in message
    assert files(tmp_path) == []


FORKED = """
import os, sys, torch, tensorloop as tl
for what in ("exits", "drops", "differentiates"):
    folder = os.path.join(sys.argv[1], what)
    x = torch.ones(3, requires_grad=True)
    out = tl.fori_loop(0, 20, lambda i, h: torch.sin(h) + h, x, checkpoints=tl.Checkpoints(k=3, offload=folder))
    if (child := os.fork()) == 0:
        if what == "drops":
            del out
        elif what == "differentiates":
            out.sum().backward()
            assert x.grad is not None
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    print(what, x.grad is not None, os.listdir(folder))
"""


def test_a_forked_process_leaves_the_folder_alone(tmp_path: Path) -> None:
    for what in ("exits", "drops", "differentiates"):
        (tmp_path / what).mkdir()
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    path = os.pathsep.join([str(Path(tl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.stdout == "exits True []\ndrops True []\ndifferentiates True []\n", done.stderr


# -- progress


def test_progress_of_backward(capsys: pytest.CaptureFixture[str]) -> None:
    body, x = Body(), torch.randn(B, D, requires_grad=True)
    out = tl.fori_loop(0, 20, body, x, checkpoints=3, progress=True)
    forward = capsys.readouterr().err
    assert "fori_loop: 100%" in forward
    assert "backward" not in forward
    out.sum().backward()
    shown = capsys.readouterr().err
    assert "fori_loop backward: 100%" in shown
    assert "20/20" in shown
    loss_of(body, x, None).backward()
    assert capsys.readouterr().err == ""
