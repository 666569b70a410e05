"""Log-probabilities in chunks against those of all logits at once: values, gradients, sizes, bytes, what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tensorloop import hf, memory

WIDTH, VOCABULARY = 5, 11
WARPERS: dict[str, Any] = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
}


def _given(count: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(count)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden = torch.randn(count, WIDTH, dtype=dtype).mul_(2).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (count,))


def _whole(head: Any, hidden: Tensor, tokens: Tensor, **cuts: Any) -> tuple[Tensor, Tensor]:
    """By all logits, as transformers' own warpers change them."""
    logits, none = head(hidden), torch.LongTensor()
    kept = logits.detach()
    for name, x in cuts.items():
        kept = WARPERS[name](x)(none, kept)
    log_probs = (logits / cuts.get("temperature", 1)).masked_fill(kept == -torch.inf, -torch.inf).log_softmax(1)
    weights = log_probs.exp()
    terms = [torch.where(w > 0, w * x, 0) for w, x in zip(weights, log_probs.nan_to_num(neginf=0), strict=True)]
    entropies = -torch.stack(terms).sum(1) if terms else weights.sum(1)
    return log_probs.gather(1, tokens[:, None])[:, 0], entropies


def _grads(head: nn.Module, hidden: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    seen = out[0].isfinite()
    loss = (out[0][seen] * torch.linspace(-1, 1, int(seen.sum()), dtype=out[0].dtype)).sum() + out[1].sin().sum()
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


@pytest.mark.parametrize("chunk_size", [1, 4, 512])
@pytest.mark.parametrize("count", [0, 1, 4, 9])
@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=["raw", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_values_and_gradients_are_those_of_all_logits(cuts: Any, count: int, chunk_size: int) -> None:
    head, hidden, tokens = _given(count)
    wanted = _whole(head, hidden, tokens, **cuts)
    found = hf.token_logprobs(head, hidden, tokens, chunk_size=chunk_size, return_entropy=True, **cuts)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(_grads(head, hidden, found), _grads(head, hidden, wanted))
    alone = hf.token_logprobs(head, hidden, tokens, chunk_size=chunk_size, **cuts)
    torch.testing.assert_close(alone, wanted[0])


def test_second_derivatives_are_those_of_all_logits() -> None:
    head, hidden, tokens = _given(7)

    def by_chunks(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.stack(hf.token_logprobs(head, hidden * weight, tokens, chunk_size=3, return_entropy=True))

    assert torch.autograd.gradgradcheck(by_chunks, (hidden, torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)))
    found, wanted = (
        torch.autograd.grad(_squares(head, hidden, out), list(head.parameters()))
        for out in (
            hf.token_logprobs(head, hidden, tokens, chunk_size=3, return_entropy=True),
            _whole(head, hidden, tokens),
        )
    )
    torch.testing.assert_close(found, wanted)


def _squares(head: nn.Module, hidden: Tensor, out: tuple[Tensor, Tensor]) -> Tensor:
    loss = out[0].sum() + out[1].square().sum()
    grads = torch.autograd.grad(loss, [hidden, *head.parameters()], create_graph=True)
    return torch.stack([x.square().sum() for x in grads]).sum()


class _Masked(nn.Module):
    """Some logits are -inf, some equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """(n, V)"""
        out = self.linear(x).index_fill(1, torch.tensor([2, 5]), -torch.inf)
        return torch.cat([out[:, :7], out[:, 6:7].expand(-1, VOCABULARY - 7)], 1)


def test_logits_of_minus_infinity_and_ties() -> None:
    torch.manual_seed(3)
    head, hidden = _Masked(), torch.randn(10, WIDTH, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (10,))
    cases: list[dict[str, Any]] = [{}, {"top_k": 2}, {"min_p": 0.5}]
    for cuts in cases:
        wanted = _whole(head, hidden, tokens, **cuts)
        found = hf.token_logprobs(head, hidden, tokens, chunk_size=4, return_entropy=True, **cuts)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(_grads(head, hidden, found), _grads(head, hidden, wanted))
    # of equal tokens top_p keeps those of lower number, however the rows are divided
    flat = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    nn.init.zeros_(flat.weight)
    nn.init.zeros_(flat.bias)
    every = torch.arange(VOCABULARY)
    found = hf.token_logprobs(flat, hidden[:1].expand(VOCABULARY, -1), every, top_p=0.5, chunk_size=4)
    assert found.isfinite().tolist() == [True] * 6 + [False] * 5


def test_shapes_and_dtypes() -> None:
    head, hidden, tokens = _given(12)
    flat = hf.token_logprobs(head, hidden, tokens, chunk_size=5)
    for shape in ((3, 4), (2, 1, 6), (12, 1)):
        found = hf.token_logprobs(head, hidden.reshape(*shape, -1), tokens.reshape(shape).int(), chunk_size=5)
        torch.testing.assert_close(found, flat.reshape(shape))
    assert hf.token_logprobs(head, hidden[0], tokens[0]).shape == ()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_summed_in_float32(autocast: bool) -> None:
    head, hidden, tokens = _given(300, torch.float32 if autocast else torch.bfloat16)
    exact = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    wanted = _whole(exact, hidden.detach().double().requires_grad_(), tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = hf.token_logprobs(head, hidden, tokens, chunk_size=32, return_entropy=True)
        logits = head(hidden)
    assert (found[0].dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    # no more than the rounding of the logits, of up to 8, and nothing of sums over the vocabulary
    assert (found[0].double() - wanted[0]).abs().max() < 2**-5
    torch.testing.assert_close(found[0], logits.float().log_softmax(1).gather(1, tokens[:, None])[:, 0])
    grads = _grads(head, hidden, found)
    assert [x.dtype for x in grads] == [hidden.dtype, *(x.dtype for x in head.parameters())]
    plain = _grads(head, hidden, _whole(lambda x: logits.float(), hidden, tokens))
    close = torch.autograd.grad(
        (wanted[0] * torch.linspace(-1, 1, 300, dtype=torch.float64)).sum() + wanted[1].sin().sum(), exact.weight
    )[0]
    error, usual = ((x[1].double() - close).abs().max() for x in (grads, plain))
    assert error < 4 * usual + 1e-3 * close.abs().max()


# V = 32,000 at d = 512 and 4,000 tokens: 512 rows of logits are 65.5 MB, all of them 512 MB.
SMALL, LARGE = (4000, 64, 4000), (4000, 512, 32000)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("sizes", [SMALL, pytest.param(LARGE, marks=pytest.mark.extended)])
def test_bytes_are_those_of_one_chunk(sizes: tuple[int, int, int], entropy: bool) -> None:
    (count, width, vocabulary), chunk = sizes, 512
    rows = chunk * vocabulary * 4
    head = nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(count, width, requires_grad=True)
    tokens = torch.randint(vocabulary, (count,))
    made: list[int] = []
    head.register_forward_hook(lambda module, given, out: made.append(len(out)))
    with memory.track() as tracked:
        out: Any = hf.token_logprobs(head, hidden, tokens, chunk_size=chunk, return_entropy=entropy)  # pyright: ignore
        loss = torch.stack(out).sum() if entropy else out.sum()
        forward, kept = tracked.peak, tracked.live
        tracked.reset_peak()
        torch.autograd.grad(loss, [hidden, head.weight])
        backward = tracked.peak
    assert made == [512] * 7 + [416] + [512] * 7
    weights, states = width * vocabulary * 4, count * width * 4
    assert kept < (3 if entropy else 1.1) * rows  # of the last chunk
    assert forward < (5 if entropy else 2.5) * rows + states
    assert backward < (6 if entropy else 4) * rows + 2 * weights + 4 * states


def test_what_has_changed_before_backward_is_refused() -> None:
    def change_weight(head: nn.Linear, hidden: Tensor) -> None:
        with torch.no_grad():
            head.weight.add_(1)

    def change_hidden(head: nn.Linear, hidden: Tensor) -> None:
        with torch.no_grad():
            hidden.add_(1)

    def exchange(head: nn.Linear, hidden: Tensor) -> None:
        head.weight = nn.Parameter(head.weight.detach() + 1)

    changes: list[tuple[Callable[..., None], str]] = [
        (change_weight, "^hf.token_logprobs: weights of the head were changed in place before backw"),
        (exchange, "^hf.token_logprobs: weights of the head were exchanged before backw"),
        (change_hidden, "modified by an inplace operation"),  # torch's own: it keeps what a chunk is given
    ]
    for change, said in changes:
        head, hidden, tokens = _given(9)
        head.weight.requires_grad_(False)  # what has a gradient needs neither: torch itself would not notice
        hidden.requires_grad_(False)
        out = hf.token_logprobs(head, hidden, tokens, chunk_size=4)
        change(head, hidden)
        with pytest.raises(RuntimeError, match=said):
            out[:4].sum().backward()


def test_dropout_of_the_head_is_the_same_again() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64))
    _, hidden, tokens = _given(9)
    torch.manual_seed(5)
    found = hf.token_logprobs(head, hidden, tokens, chunk_size=4, return_entropy=True)
    torch.manual_seed(5)
    parts = torch.cat([head(hidden[i : i + 4]) for i in (0, 4, 8)])
    wanted = _whole(lambda x: parts, hidden, tokens)
    torch.testing.assert_close(_grads(head, hidden, found), _grads(head, hidden, wanted))


def test_bad_input_is_refused() -> None:
    head, hidden, tokens = _given(4)
    cases: list[tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = [
        ((lambda x: x, hidden, tokens), {}, TypeError, r"head must be an nn.Module that makes logits of states, got f"),
        ((head, hidden.tolist(), tokens), {}, TypeError, "hidden: expected a tensor, got list"),
        ((head, hidden.long(), tokens), {}, TypeError, r"hidden must be floats \(..., d\), got torch.int64"),
        ((head, hidden, tokens.double()), {}, TypeError, "tokens must be int64, got torch.float64"),
        ((head, hidden[:3], tokens), {}, ValueError, r"hidden must be .*, got \(3, 5\) for \(4,\)"),
        ((head, hidden, tokens.to("meta")), {}, ValueError, "hidden is on cpu, tokens on meta"),
        ((head, hidden, tokens - 100), {}, IndexError, r"tokens has -\d+, expected 0 to 10; leave out what is padding"),
        ((head, hidden, tokens + 11), {}, IndexError, r"tokens has \d+, expected 0 to 10"),
        (
            (nn.Flatten(0), hidden, tokens),
            {},
            ValueError,
            r"head must make logits \(n, V\) of states \(4, 5\), got \(2",
        ),
        ((head, hidden, tokens), {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ((head, hidden, tokens), {"chunk_size": 2.5}, TypeError, "chunk_size must be an int"),
        ((head, hidden, tokens), {"return_entropy": 1}, TypeError, "return_entropy must be True or False, got int 1"),
        ((head, hidden, tokens), {"temperature": True}, ValueError, "temperature must be a finite number above 0"),
        ((head, hidden, tokens), {"temperature": float("nan")}, ValueError, "temperature must be a finite number"),
        ((head, hidden, tokens), {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ((head, hidden, tokens), {"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ((head, hidden, tokens), {"min_p": 1.5}, ValueError, r"min_p must be in \(0, 1\], got 1.5"),
        ((head, hidden, tokens), {"min_p": "a"}, TypeError, "min_p must be a number, got str 'a'"),
    ]
    for given, options, kind, said in cases:
        with pytest.raises(kind, match=f"^hf.token_logprobs: {said}"):
            hf.token_logprobs(*given, **options)
