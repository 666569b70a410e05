"""The pretended device is one: where tensors are, what is refused, which generator draws, what is counted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.device import built, excluded, pretended


def on(device: str, *size: int) -> Tensor:
    return torch.randn(*size, device="cpu").to(device)


def test_gradients_are_on_the_device_and_those_of_the_cpu() -> None:
    x, w = on("cpu", 3, 4), on("cpu", 4, 4)
    results = []
    for device in ("cpu", "cuda", "cuda:1"):
        here = [t.to(device).requires_grad_() for t in (x, w)]
        y = torch.tanh(here[0] @ here[1])[:, 1:].softmax(1).square().sum()
        grads = torch.autograd.grad(y, here)
        assert {g.device for g in grads} == {y.device} == {here[0].device}
        results.append([t.detach().cpu() for t in (y, *grads)])
    torch.testing.assert_close(results[0] * 2, results[1] + results[2], rtol=0, atol=0)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y @ x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.gather(0, y.long()),
        lambda x, y: x.scatter_add_(0, torch.zeros_like(x).long(), y),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.add_(y),
        lambda x, y: y.add_(x),
        lambda x, y: y + x[0, 0],
    ],
)
@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(mix: Callable[[Tensor, Tensor], Any], other: str) -> None:
    with pytest.raises(RuntimeError, match=f"found at least two devices, (cuda:0 and {other}|{other} and cuda:0)!"):
        mix(on("cuda:0", 2, 2), on(other, 2, 2))


def test_numbers_of_the_host_mix_as_with_cuda() -> None:
    x, one = on("cuda", 3), torch.tensor(1.0, device="cpu")
    with pretended.counted() as counts:
        for y in (x + one, one * x, torch.where(x > 0, x, one), x.masked_fill(x > 0, one), x.clone().fill_(one)):
            assert y.device == x.device
        x[x > 0] = 1.0
    assert counts.syncs == []
    with pytest.raises(RuntimeError, match="found at least two devices"):
        x.gather(0, torch.tensor(0, device="cpu"))


def sum_of(x: Tensor) -> float:
    return x.sum().item()


SYNCS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "item": (sum_of, ["item"]),
    "bool": (lambda x: bool(x[0, 0] > 0), ["item"]),
    "int": (lambda x: int(x[0, 0]), ["item"]),
    "tolist": (lambda x: x.tolist(), ["copy to the host"]),
    "cpu": (lambda x: x.cpu(), ["copy to the host"]),
    "not waiting": (lambda x: x.to("cpu", non_blocking=True), []),
    "to the device": (lambda x: x + torch.tensor([1.0], device="cuda"), ["copy to the device"]),
    "filled": (lambda x: x + torch.full((2,), 3.0, device="cuda"), []),
    "nonzero": (lambda x: x.nonzero(), ["nonzero"]),
    "by a mask": (lambda x: x[x > 0], ["index by a mask"]),
    "written by a mask": (lambda x: x.index_put_((x > 0,), x.new_ones(1)), ["index by a mask"]),
    "by a list": (lambda x: x[[0, 1]], ["copy to the device"]),
    "by indices": (lambda x: x[torch.arange(2, device="cuda")], []),
    "equal": (lambda x: torch.equal(x, x.clone()), ["equal"]),
    "allclose": (lambda x: torch.allclose(x, x), ["item"]),
    "repeated": (lambda x: x.repeat_interleave(torch.ones(2, device="cuda").long(), 0), ["repeat_interleave"]),
    "repeated so often": (
        lambda x: x.repeat_interleave(torch.ones(2, device="cuda").long(), 0, output_size=2),
        [],
    ),
    "synchronize": (lambda x: torch.cuda.synchronize(), ["synchronize"]),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("name", SYNCS)
def test_what_waits_is_reported_and_what_does_not_is_not(name: str) -> None:
    run, kinds = SYNCS[name]
    x = on("cuda", 2, 2)
    with pretended.counted() as counts:
        run(x)
    assert [sync.kind for sync in counts.syncs] == kinds
    torch.cuda.set_sync_debug_mode("error")
    try:
        if kinds:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                run(x)
        else:
            run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sync_names_the_lines_that_wait() -> None:
    first = sum_of.__code__.co_firstlineno
    with pretended.counted() as counts:
        sum_of(on("cuda", 3).requires_grad_())
    (sync,) = [sync for sync in counts.syncs if sync.kind == "item"]
    caller = test_a_sync_names_the_lines_that_wait.__code__.co_firstlineno + 3
    here, caller = f"{__file__}:{first + 1}", f"{__file__}:{caller}"
    assert sync.lines[:2] == (here, caller)
    assert str(sync).startswith(f"item (aten::_local_scalar_dense) at {here} < {caller}")


def test_launches_are_those_of_cuda() -> None:
    x = on("cuda", 3, 3).requires_grad_()
    with pretended.counted() as counts:
        (x[1:].t() @ x[1:]).tanh().sum().backward()
    assert counts.operations["aten::tanh"] == 1
    assert counts.operations["aten::mm"] == 3
    with pretended.counted() as counts:
        torch.ops.aten._foreach_add_([x.detach(), x.detach()], 1.0)
        torch.empty(3, device="cuda").view(3, 1).expand(3, 3).unbind()
    assert counts.operations == {"aten::_foreach_add_": 1}


def test_a_device_draws_from_its_own_generator() -> None:
    torch.manual_seed(0)
    host = torch.get_rng_state()
    before = torch.cuda.get_rng_state("cuda:0"), torch.cuda.get_rng_state("cuda:1")
    x = torch.rand(3, device="cuda:0"), F.dropout(torch.ones(8, device="cuda:0")), torch.randperm(5, device="cuda:0")
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.cuda.get_rng_state("cuda:1"), before[1])
    assert not torch.equal(torch.cuda.get_rng_state("cuda:0"), before[0])
    torch.cuda.set_rng_state_all([before[0], before[1]])
    y = torch.rand(3, device="cuda:0"), F.dropout(torch.ones(8, device="cuda:0")), torch.randperm(5, device="cuda:0")
    torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_generator_of_the_device_may_be_given() -> None:
    generator = torch.Generator("cuda:1").manual_seed(3)
    state = generator.get_state()
    before = torch.cuda.get_rng_state("cuda:1")
    x = torch.randn(4, device="cuda:1", generator=generator)
    assert torch.equal(torch.cuda.get_rng_state("cuda:1"), before)
    assert torch.equal(x, torch.randn(4, device="cuda:1", generator=generator.set_state(state)))


def test_memory_is_shared_resized_and_set_as_on_any_device() -> None:
    x = torch.zeros(4, device="cuda")
    view = x[1:3]
    view.fill_(2)
    assert x.tolist() == [0, 2, 2, 0]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert view.untyped_storage().device == x.device
    x.resize_(9)[4:].zero_()
    assert x.tolist() == [0, 2, 2, 0, 0, 0, 0, 0, 0]
    y = torch.empty(0, device="cuda").set_(x.untyped_storage(), 1, (2,))  # pyright: ignore
    y.add_(1)
    assert x.tolist()[:4] == [0, 3, 3, 0]
    out = torch.empty(0, device="cuda")
    torch.add(x, 1, out=out)
    assert out.tolist() == [1, 4, 4, 1, 1, 1, 1, 1, 1]


def test_devices_and_streams_are_chosen() -> None:
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device == torch.device("cuda:1")
    assert torch.ones(2, device="cuda").device == torch.device("cuda:0")
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        event.record()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(event)
    torch.ones(2, device="cuda").record_stream(side)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:2")


def test_pinned_memory_is_known() -> None:
    pinned = torch.ones(8, device="cpu").pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not torch.ones(8, device="cpu").is_pinned()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_are_one_kernel_and_right(kind: str, bias: bool) -> None:
    cell = getattr(nn, kind)(3, 4, bias=bias, device="cpu")
    x = on("cpu", 5, 3)

    def gradients(x: Tensor) -> list[Tensor]:
        found = cell(x)
        leaves = [*cell.parameters(), x]
        loss = (found[0] if isinstance(found, tuple) else found).square().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return [t.detach().cpu() for t in (*grads, *torch.autograd.grad([g.sum() for g in grads], leaves))]

    expected = gradients(x.requires_grad_())
    cell.cuda()
    with pretended.counted() as counts:
        torch.testing.assert_close(gradients(x.detach().cuda().requires_grad_()), expected)
    assert sum(n for name, n in counts.operations.items() if "fused" in name) == (10 if "Cell" not in kind else 2)


def test_what_is_excluded_exists() -> None:
    tests = Path(__file__).parents[1]
    names = [name for table in (excluded.EXCLUDED, excluded.NOT_RUN) for names in table.values() for name in names]
    for name in names:
        file, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}" in (tests / file).read_text(), name


def test_a_test_is_excluded_by_its_name_and_case() -> None:
    test = "tests/tensor_array/test_tensor_array_errors.py::test_constructors_refuse"
    assert excluded.reason(f"{test}[words12]") == (excluded.SPARSE, True)
    assert excluded.reason(f"{test}[words1]") is None
    assert excluded.reason(f"{test}_more[words12]") is None
    assert excluded.reason("tests/packed/table/test_packed_compile.py::test_any[1]") == (excluded.GRAPHS, False)


def test_the_native_code_is_short() -> None:
    lines = [line.strip() for path in built.SOURCES for line in path.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("//") for line in lines) <= 490


SLOW_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo half > "$2"
echo $$ > "{folder}/compiles"
[ -e "{folder}/slow" ] && exec sleep 600
exit 0
"""


def test_a_build_that_was_killed_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, path = tmp_path / "g++", tmp_path / "device-0.so"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "slow").touch()
    program = "import sys; from pathlib import Path; from tests.device import built; built.build(Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as first:
        while not (tmp_path / "compiles").exists():
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
    os.kill(int((tmp_path / "compiles").read_text()), signal.SIGKILL)
    assert len(list(tmp_path.glob("device-0.[0-9]*"))) == 1
    (tmp_path / "slow").unlink()
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=60)
    assert path.read_text() == "half\n"
    assert list(tmp_path.glob("device-0.[0-9]*")) == []
