"""Bodies in which torch does more than the operation that is written: tangents of zeros, state of modules, groups."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrizations
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.both_ways import check_both

D = torch.float64
XS = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
W = torch.sin(torch.arange(9, dtype=D)).view(3, 3)


def energy(h: Tensor, w: Tensor) -> Tensor:
    return (w @ h).sin().sum()


DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hessian": lambda h, w: torch.func.hessian(energy)(h, w).sum(0),
    "jacfwd of jacfwd": lambda h, w: torch.func.jacfwd(torch.func.jacfwd(energy))(h, w).sum(0),
    "jvp of grad": lambda h, w: torch.func.jvp(torch.func.grad(lambda z: energy(z, w)), (h,), (h.cos(),))[1],
    "jacobian": lambda h, w: torch.autograd.functional.jacobian(lambda z: (w @ z).sin(), h, create_graph=True).sum(0),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_second_derivatives_in_a_body(name: str) -> None:
    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        return tl.scan(lambda h, x: (h + 0.1 * DERIVATIVES[name](h, w) + x, h.sum()), h, xs, compile=compile)

    check_both(run, XS[1], XS, W)


def test_what_comes_of_a_tensor_without_values_is_refused() -> None:
    def body(h: Tensor, x: Tensor) -> Any:
        return h + torch.rand_like(x.to("meta"), device="cpu"), None

    with pytest.warns(NotCompiledWarning, match="a tensor on meta is used or made in a loop on cpu"):
        tl.scan(body, XS[0], XS, compile=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_that_is_carried(norm: Any, training: bool) -> None:
    vectors = []

    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        torch.manual_seed(0)
        linear = norm(nn.Linear(3, 3, dtype=D)).train(training)
        found = tl.carrying(linear).scan(lambda h, x: (torch.tanh(linear(h) @ w + x), h), h, xs, compile=compile)
        vectors.append(torch.cat([*linear.buffers()]).detach().clone())
        return found

    check_both(run, XS[:2], XS[:, None], W)
    for after in vectors[1:]:
        torch.testing.assert_close(after, vectors[0])


def test_results_are_written_without_gradients_to_a_tensor_that_has_one() -> None:
    def body(h: Tensor, x: Tensor, w: Tensor) -> Any:
        y = h @ w
        with torch.no_grad():
            torch.mul(y, x, out=y)
            torch.div(x, y.exp(), out=y)
        return torch.sin(y), y * x

    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        return tl.scan(lambda h, x: body(h, x, w), h, xs, compile=compile)

    check_both(run, XS[0], XS, W)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.flip(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Turned.apply(g)


def test_a_function_whose_backward_is_itself() -> None:
    with pytest.warns(
        NotCompiledWarning, match=r"Function Turned raises RecursionError: .* Cure: write its formula out"
    ):
        tl.scan(lambda h, x: (Turned.apply(h) + x, None), XS[0].clone().requires_grad_(), XS, compile=True)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_of_processes_in_a_body() -> None:
    def body(h: Tensor, x: Tensor) -> Any:
        h = h * 1.5 + x
        dist.all_reduce(h)
        return h, None

    expected = tl.scan(body, XS[0], XS)[0]
    with pytest.warns(NotCompiledWarning, match=r"all_reduce\(\) runs between processes"):
        assert torch.equal(tl.scan(body, XS[0], XS, compile=True)[0], expected)


@pytest.mark.usefixtures("alone")
def test_a_sharded_module_that_has_not_run_yet() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    linear = nn.Linear(3, 3, dtype=D)
    expected = tl.scan(lambda h, x: (linear(h).tanh() + x, None), XS[:1], XS)[0].detach()
    fully_shard(linear, mesh=init_device_mesh("cpu", (1,)))
    with pytest.warns(NotCompiledWarning, match="the body calls a module of FSDP"):
        found = tl.scan(lambda h, x: (linear(h).tanh() + x, None), XS[:1], XS, compile=True)[0]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert linear.weight.grad is not None
