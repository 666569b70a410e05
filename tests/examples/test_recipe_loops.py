"""The recipes of diffusion, adaptive computation time and the Kalman filter: beside plain loops and beside formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from docs.examples.recipes import act, diffusion, kalman
from tensorloop import memory


def agree(model: nn.Module, found: Tensor, expected: Tensor, bound: float = 1e-10) -> None:
    """Values and gradients of all parameters."""
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    grads = [torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=bound, atol=bound)


@pytest.fixture
def generator() -> torch.Generator:
    torch.manual_seed(0)
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 4}, {"compile": "strict"}])
def test_a_sampler_is_its_python_loop(generator: torch.Generator, options: dict[str, Any]):
    model, noise = diffusion.Denoiser(8).double(), torch.randn(5, 2, generator=generator, dtype=torch.float64)
    agree(model, diffusion.sample(model, noise, 12, **options), diffusion.plain_sample(model, noise, 12))


def test_the_last_steps_alone_have_their_own_gradient(generator: torch.Generator):
    model, noise = diffusion.Denoiser(8).double(), torch.randn(5, 2, generator=generator, dtype=torch.float64)
    whole, late = (diffusion.sample(model, noise, 12, last=last, checkpoints=3) for last in (None, 3))
    torch.testing.assert_close(late, whole)
    agree(model, diffusion.sample(model, noise, 12, last=12), diffusion.sample(model, noise, 12))
    grads = [torch.autograd.grad(x.sum(), list(model.parameters())) for x in (late, whole)]
    assert not torch.allclose(grads[0][0], grads[1][0], rtol=0.1)
    with torch.no_grad():
        x = diffusion.sample(model, noise, 12)
    torch.testing.assert_close(diffusion.sample(model, noise, 12, last=0), x)


def test_a_sampler_is_tuned_through_all_its_steps(generator: torch.Generator):
    model = diffusion.Denoiser(32)
    diffusion.train(
        model, lambda: diffusion.denoising_loss(model, diffusion.make_ring(256, generator), generator), 150, 3e-3
    )
    noise = torch.randn(64, 2, generator=generator)

    def loss() -> Tensor:
        return -diffusion.to_the_right(diffusion.sample(model, noise, 15, checkpoints=5)).mean()

    losses = diffusion.train(model, loss, 10, 3e-3)
    assert losses[-1] < losses[0] - 0.3


def test_the_likelihood_is_that_of_the_joint_normal(generator: torch.Generator):
    """Of all observations of a row at once, (T * E) numbers; a number that is missing is left out."""
    T, rows, D, E = 4, 3, 3, 2
    model = kalman.Kalman(*(torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (D, E)))
    ys = torch.randn(T, rows, E, generator=generator, dtype=torch.float64)
    ys[1, 0, 1] = ys[2, 1] = torch.nan
    nn.init.normal_(model.double().log_drift)
    nn.init.normal_(model.log_noise)
    A, C, drift, noise = model.transition, model.observation, model.log_drift, model.log_noise
    powers = [torch.linalg.matrix_power(A, t) for t in range(T)]
    covs = [torch.eye(D, dtype=torch.float64)]
    for _ in range(T - 1):
        covs.append(A @ covs[-1] @ A.T + drift.exp().diag())
    blocks = [
        [C @ (powers[i - j] @ covs[j] if i >= j else covs[i] @ powers[j - i].T) @ C.T for j in range(T)]
        for i in range(T)
    ]
    joint = torch.cat([torch.cat(row, 1) for row in blocks]) + noise.exp().repeat(T).diag()
    expected = []
    for y in ys.transpose(0, 1).flatten(1):
        seen = ~y.isnan()
        normal = torch.distributions.MultivariateNormal(torch.zeros(int(seen.sum())).double(), joint[seen][:, seen])
        expected.append(normal.log_prob(y[seen]))
    agree(model, model(ys)[0], torch.stack(expected), 1e-9)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 3}, {"compile": "strict", "checkpoints": 2}])
def test_a_filter_is_its_python_loop_and_learns(generator: torch.Generator, options: dict[str, Any]):
    _, ys = kalman.make_series(20, 4, generator)
    model = kalman.Kalman(torch.tensor([[0.9, 0.1], [-0.1, 0.9]]), torch.tensor([[1.0, 0.0]])).double()
    ys = ys.double()
    agree(model, model(ys, **options)[0], model.plain(ys))
    losses = kalman.train(model, ys, 20, **options)
    assert losses[-1] < losses[0] - 0.1


def test_a_filter_of_two_parts_begins_where_the_first_ended(generator: torch.Generator):
    """Means given all up to a time do not know what comes after it."""
    _, ys = kalman.make_series(20, 4, generator)
    model = kalman.Kalman(torch.tensor([[0.9, 0.1], [-0.1, 0.9]]), torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(model(ys[:7])[1], model(ys)[1][:7])


@pytest.mark.parametrize("checkpoints", [None, 1, 3])
def test_pondering_is_its_python_loop(generator: torch.Generator, checkpoints: int | None):
    model = act.Pondering(4, 8, most=6).double()
    nn.init.normal_(model.halt.weight, std=5.0)
    nn.init.constant_(model.halt.bias, -2.0)
    xs = act.make_parities(5, 7, 4, generator)[0].double()
    found, expected = model(xs, checkpoints=checkpoints), model.plain(xs)
    assert torch.equal(found[2], expected[2])
    assert len(set(found[2].flatten().tolist())) > 2
    agree(model, torch.stack(found[:2]), torch.stack(expected[:2]))


def test_pondering_ends_as_graves_has_it():
    """With probability 0.4 at each step: the third takes the 0.2 that are left; with 0.1, `most` ends it."""
    model = act.Pondering(4, 8, most=4)
    nn.init.zeros_(model.halt.weight)
    for p, steps, rest in ((0.4, 3, 0.2), (0.1, 4, 0.7), (0.995, 1, 1.0)):
        nn.init.constant_(model.halt.bias, torch.tensor(p).logit().item())
        _, cost, taken = model(torch.randn(2, 3, 4))
        torch.testing.assert_close(cost, torch.full((2, 3), steps + rest), rtol=1e-5, atol=1e-5)
        assert taken.unique().tolist() == [steps]


def test_memory_of_recipes_stays_where_time_goes_on(generator: torch.Generator):
    denoiser, filter_ = diffusion.Denoiser(), kalman.Kalman(torch.eye(2), torch.tensor([[1.0, 0.0]]))
    pondering = act.Pondering(4, 8)

    def held(T: int, checkpoints: int | None) -> tuple[int, ...]:
        noise, ys = torch.randn(16, 2), torch.randn(T, 16, 1)
        xs = act.make_parities(T, 16, 4, generator)[0]
        return (
            memory.saved_bytes(lambda: diffusion.sample(denoiser, noise, T, checkpoints=checkpoints).sum()),
            memory.saved_bytes(lambda: filter_(ys, checkpoints=checkpoints)[0].sum()),
            memory.saved_bytes(lambda: pondering(xs, checkpoints=checkpoints)[0].sum()),
        )

    for before, after, plain in zip(held(16, 4), held(64, 4), held(64, None), strict=True):
        assert after < plain / 10
        assert after - before < plain / 20  # ys of the scan, a few numbers a step
