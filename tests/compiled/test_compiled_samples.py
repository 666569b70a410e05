"""Samples of torch.distributions in compiled loops, which check arguments in Python, and other bools beside draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run import stretches
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

D, B, N, T = torch.float64, 3, 5, 11
pytestmark = pytest.mark.usefixtures("fresh_plans")
W = torch.linalg.qr(torch.randn(N, N, dtype=D, generator=Generator(HERE).manual_seed(1)))[0].requires_grad_()
OWN = Generator(HERE)


@pytest.fixture(autouse=True)
def _validates(monkeypatch: pytest.MonkeyPatch) -> None:  # some packages turn it off as they are imported
    monkeypatch.setattr(td.Distribution, "_validate_args", True)


def categorical(h: Tensor, x: Tensor) -> Any:
    choice = td.Categorical(logits=h @ W + x)
    token = choice.sample()
    return torch.tanh(h + W[token]), (token, choice.log_prob(token), choice.entropy())


def of_probabilities(h: Tensor, x: Tensor) -> Any:
    choice = td.Categorical(probs=(h @ W + x).softmax(-1))
    token = choice.sample()
    return torch.tanh(h + W[token]), (token, choice.log_prob(token))


def two_at_once(h: Tensor, x: Tensor) -> Any:
    choice = td.Categorical(probs=(h @ W + x).softmax(-1))
    token = choice.sample((2,))
    return torch.tanh(h + W[token[0]] - W[token[1]]), (token, choice.log_prob(token))


def one_hot(h: Tensor, x: Tensor) -> Any:
    choice = td.OneHotCategorical(logits=h @ W + x)
    token = choice.sample()
    return torch.tanh(h + token @ W), (token, choice.log_prob(token))


def straight_through(h: Tensor, x: Tensor) -> Any:
    token = td.OneHotCategoricalStraightThrough(logits=h @ W + x).rsample()
    return torch.tanh(h + token @ W), token


def normal(h: Tensor, x: Tensor) -> Any:
    around = td.Independent(td.Normal(h @ W, F.softplus(x)), 1)
    found = around.rsample()
    return torch.tanh(found), around.log_prob(found)


def in_one_dim(h: Tensor, x: Tensor) -> Any:
    token = torch.multinomial((h + x).sum(0).softmax(-1), 1, True)
    return torch.tanh(h @ W + x + W[token]), token


SAMPLES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "categorical": categorical,
    "categorical of probabilities": of_probabilities,
    "two at once": two_at_once,
    "one-hot": one_hot,
    "straight through": straight_through,
    "normal": normal,
    "multinomial of one row": in_one_dim,
}


def by_x(h: Tensor, x: Tensor) -> Any:
    if x[0, 0] > 0:
        return torch.tanh(h @ W + x), torch.rand(2, generator=OWN)
    return torch.tanh(h @ W + F.dropout(x, 0.4)), torch.rand(2)


def by_what_is_drawn(h: Tensor, x: Tensor) -> Any:
    noise = torch.rand_like(x)
    if noise.sum() > x.numel() / 2:
        noise = noise * torch.randn_like(x)
    return torch.tanh(h @ W + noise + x), noise


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {"an input": by_x, "what is drawn": by_what_is_drawn}


def outcome(body: Callable[..., Any], compile: Any, steps: int = T, grad: bool = True, **options: Any) -> list[Any]:
    """What a loop gives, its gradients and the generators' states; or its error, and those."""
    torch.manual_seed(3)
    OWN.manual_seed(4)
    h = torch.full((B, N), 0.1, dtype=D, requires_grad=grad)
    xs = torch.sin(torch.arange(steps * B * N, dtype=D)).view(steps, B, N).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        found = tree_leaves(tl.scan(body, h, xs, compile=compile, **options))
    grads: list[Any] = []
    if grad:
        loss = torch.stack([y.sin().sum() for y in found if y.requires_grad]).sum()
        grads = list(torch.autograd.grad(loss, [h, xs, W], allow_unused=True))
    return [found, grads, [torch.rand(2), torch.rand(2, generator=OWN)]]


def check_same(body: Callable[..., Any], compile: Any = "strict", **options: Any) -> None:
    expected, found = outcome(body, False, **options), outcome(body, compile, **options)
    check_equal(found[0], expected[0], 1e-11)
    check_equal(found[1], expected[1], 1e-11)
    check_equal(found[2], expected[2], 0)


@pytest.mark.parametrize("options", [{}, {"grad": False}, {"reverse": True}], ids=["plain", "no grad", "reverse"])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_those_of_the_eager_loop(name: str, options: dict[str, Any]):
    for _ in range(2):
        check_same(SAMPLES[name], **options)


def test_torch_chooses_one_by_the_race_that_is_run_here():
    """One choice is the largest of p / q, where q are exponential: with and without putting back."""
    p = torch.rand(7, 9, dtype=D)
    for replacement in (False, True):
        torch.manual_seed(0)
        chosen = torch.multinomial(p, 1, replacement)
        torch.manual_seed(0)
        assert torch.equal(chosen, (p / torch.empty_like(p).exponential_(1)).argmax(-1, keepdim=True))


@pytest.mark.parametrize("options", [{}, {"grad": False}, {"reverse": True}], ids=["plain", "no grad", "reverse"])
@pytest.mark.parametrize("name", READS)
def test_a_stretch_draws_as_much_as_it_has_steps(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stretches, "SHORT", 100)
    for _ in range(2):
        check_same(READS[name], **options)


def test_without_gradients_few_numbers_are_there_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stretches, "MOST_NUMBERS", 4)
    check_same(categorical, grad=False)


@pytest.mark.filterwarnings("ignore:.*prints a tensor")  # the error shows the numbers
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_wrong_at_a_later_step_is_the_eager_loops_error(grad: bool):
    def body(h: Tensor, x: Tensor, at: float) -> Any:
        logits = torch.where(x[0, 0] < at, torch.nan, h @ W + x)
        choice = td.Categorical(logits=logits)
        return torch.tanh(h + W[choice.sample()]), None

    said = []
    for compile in (False, True):
        with pytest.raises(ValueError, match="Expected parameter logits") as raised:
            outcome(lambda h, x: body(h, x, -0.9), compile, grad=grad)
        said.append([str(raised.value), raised.value.__notes__, torch.rand(2)])
    assert said[0][:2] == said[1][:2]
    assert torch.equal(said[0][2], said[1][2])


def test_with_checkpoints_such_a_loop_runs_eagerly():
    with pytest.warns(NotCompiledWarning, match="draws random numbers and reads a value in Python, with checkpoints="):
        outcome(categorical, True, checkpoints=2)
    check_same(
        lambda h, x: (torch.tanh(h + W[td.Categorical(logits=h @ W + x, validate_args=False).sample()]), h),
        checkpoints=2,
    )


def test_complex_draws_beside_a_value_that_is_read_run_eagerly():
    def body(h: Tensor, x: Tensor) -> Any:
        return (h if x[0, 0] > 0 else h + x), torch.randn(3, dtype=torch.cdouble)

    with pytest.warns(NotCompiledWarning, match="draws complex random numbers and reads"):
        outcome(body, True)
