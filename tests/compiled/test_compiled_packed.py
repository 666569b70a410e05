"""Compiled scans over packed xs: what the eager loop gives, on a batch that keeps rows that have ended, masked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.look import padded_rows
from tensorloop.loop.compiled.look.padded_rows import PaddedScan
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.packed import PackedTensor
from tests.support.compiled_cases import bytes_kept, check_equal, leaf, outcome, rotation
from tests.support.packed_loops import CASES, LENS

D = torch.float64


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Stretches are cut wherever rows are half as many; how many rows each had, scan by scan."""
    found: list[list[int]] = []
    cut = PaddedScan.cut

    def noted(self: PaddedScan, work: int, kept: int) -> None:
        cut(self, work, kept)
        found.append([len(s.ids) for s in self.stretches])

    monkeypatch.setattr(padded_rows, "WORTH_A_CUT", (1, 1))
    monkeypatch.setattr(PaddedScan, "cut", noted)
    return found


def both(name: str, dtype: torch.dtype = D, tolerance: float = 1e-11, lens: list[int] = LENS, **options: Any) -> None:
    """Compares the compiled loop with the eager one."""
    expected, expected_grads = outcome(lambda d: CASES[name](d, lens), dtype, False, **options)
    found, grads = outcome(lambda d: CASES[name](d, lens), dtype, "strict", **options)
    check_equal(found, expected, tolerance)
    check_equal(grads, expected_grads, tolerance)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lens", [LENS, [1], [4, 4], [0, 2, 0], [1, 2, 3, 4, 5, 6, 7], [6, 1]], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.few
def test_values_and_gradients_are_those_of_the_eager_loop(name: str, lens: list[int], reverse: bool):
    both(name, lens=lens, reverse=reverse)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.extended
def test_in_float32(name: str):
    both(name, torch.float32, 2e-4)


@pytest.mark.parametrize("name", CASES)
def test_stretches_of_fewer_and_fewer_rows_change_no_number(name: str, cuts: list[list[int]]):
    both(name, lens=[1, 9, 2, 0, 5, 2, 9, 3, 1])
    assert cuts == [[8, 4, 2]]
    both(name, lens=[1, 9, 2, 0, 5, 2, 8, 3, 1], reverse=True)
    assert cuts[1:] == [[8, 4, 2, 1]]


@pytest.mark.parametrize("worth", [(10**15, 10**15), (10**15, 1), (1, 10**15)], ids=str)
def test_a_cut_spares_operations_or_bytes(
    worth: tuple[int, int], monkeypatch: pytest.MonkeyPatch, cuts: list[list[int]]
):
    monkeypatch.setattr(padded_rows, "WORTH_A_CUT", worth)
    both("lstm_with_a_context", lens=[1, 9, 2])
    assert cuts == [[3, 2, 1] if 1 in worth else [3]]
    with torch.no_grad():  # where nothing is kept
        both("lstm_with_a_context", lens=[1, 9, 2])
    assert cuts[1:] == [[3, 2, 1] if worth[0] == 1 else [3]]


@pytest.mark.parametrize("lens", [LENS * 4, [40 * n**3 // 32**3 for n in range(33)]], ids=["some", "few long"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.extended("some")
def test_of_lengths_of_all_kinds_half_as_much_again_is_kept_at_most(name: str, lens: list[int], cuts: list[list[int]]):
    kept = []
    for compile in (False, "strict"):
        torch.manual_seed(0)
        kept.append(bytes_kept(CASES[name](D, lens), compile))
    assert 0 < kept[1] <= 1.5 * kept[0]


def test_under_another_default_device():
    for compile in (False, "strict"):
        with torch.device("meta"):
            xs = PackedTensor(torch.ones(8, 2, device="cpu"), torch.tensor([5, 1, 2], device="cpu"))
            h, ys = tl.scan(lambda h, x: (h + x, h), torch.zeros(3, 2, device="cpu"), xs, compile=compile)
        assert h[:, 0].tolist() == [5, 1, 2]
        assert ys.values[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 1]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans(), st.sampled_from(sorted(CASES)))
def test_any_lengths(lens: list[int], reverse: bool, name: str):
    if sum(lens):
        both(name, lens=lens, reverse=reverse)


@pytest.mark.parametrize("checkpoints", [1, 2, 100])
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_change_no_number(name: str, checkpoints: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.MOST_STEPS", 2)
    both(name, checkpoints=checkpoints, tolerance=1e-10)


def test_checkpoints_are_of_one_stretch(cuts: list[list[int]]):
    both("lstm_with_a_context", lens=[1, 9, 2, 1], checkpoints=2)
    assert cuts == [[4]]


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str):
    with torch.no_grad():
        both(name)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.extended("True")
def test_gradients_of_both_orders(cut: bool, request: pytest.FixtureRequest):
    if cut:
        request.getfixturevalue("cuts")
    turn = rotation(D)

    def loss(values: Tensor, h: Tensor, scale: Tensor, turn: Tensor) -> Tensor:
        def body(h: Tensor, x: Tensor, scale: Tensor) -> Any:
            h = h @ turn + (x * scale).sin()
            return h, h.square()

        h, ys = tl.scan(body, h, PackedTensor(values, [2, 0, 4, 1]), context=scale, compile="strict")
        return torch.cat([h.flatten().sin(), ys.values.flatten()])

    inputs = leaf(D, 7, 4), leaf(D, 4, 4), leaf(D, 4, 4), turn
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_inputs_that_are_not_used_have_no_gradient():
    values, h = leaf(D, 7, 3), leaf(D, 3, 3)

    def body(h: Tensor, x: Tensor) -> Any:
        return h.sin() + (x > 0), 2 * h

    _, ys = tl.scan(body, h, PackedTensor(values, [4, 1, 2]), compile="strict")
    assert torch.autograd.grad(ys.values.sum(), (h, values), allow_unused=True)[1] is None


def test_values_that_are_not_contiguous():
    values, turn = leaf(D, 4, 11), rotation(D)

    def run(compile: Any) -> list[Tensor]:
        packed = PackedTensor(values.T, [5, 2, 4])
        h, ys = tl.scan(lambda h, x: (h := h @ turn + x, h), torch.zeros(4, 3, dtype=D).T, packed, compile=compile)
        return [h, ys.values, *torch.autograd.grad(h.sin().sum() + ys.values.cos().sum(), (values, turn))]

    check_equal(run("strict"), run(False), 1e-12)


def test_a_plan_serves_other_lengths(fresh_plans: None):
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4)

    def run(lens: list[int]) -> None:
        xs = PackedTensor(torch.randn(sum(lens), 3), lens)
        tl.scan(lambda h, x: (cell(x, h),) * 2, torch.zeros(3, 4), xs, compile="strict")

    run([5, 2, 1])
    assert plans.made == 1
    run([1, 7, 4])
    run([1, 0, 7])  # of two rows
    assert plans.made == 2


def test_a_number_of_rows_is_tried_once(fresh_plans: None, monkeypatch: pytest.MonkeyPatch):
    tried, of_rows = list[int](), front.of_rows
    monkeypatch.setattr(front, "of_rows", lambda loop, ids: tried.append(len(ids)) or of_rows(loop, ids))

    def run(lens: list[int]) -> list[int]:
        tried.clear()
        xs = PackedTensor(torch.randn(sum(lens), 2), lens)
        tl.scan(lambda h, x: (torch.sin(h + x), h), torch.zeros(len(lens), 2), xs, compile="strict")
        return sorted(tried)

    assert run([3, 2, 1, 3]) == [2, 3]
    assert run([3, 9, 1, 4]) == [1]
    assert run([9, 9, 1, 4]) == []


def heads(h: Tensor, x: Tensor) -> Tensor:
    """Attention of two heads over three slots of x, heads in the batch as torch's layers have them."""
    q, slots = h.reshape(len(h) * 2, 1, 2), x.unsqueeze(1).expand(-1, 3, -1)
    keys = slots.unflatten(-1, (2, 2)).transpose(1, 2).reshape(len(h) * 2, 3, 2)
    return torch.bmm(torch.bmm(q, keys.transpose(1, 2)).softmax(-1), keys).reshape(len(h), 4)


def written_columns(h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[:, :2] = x[:, 2:]
    return h


KERNEL = torch.tensor([[[0.3, -0.5, 0.4]], [[0.2, 0.1, -0.6]]], dtype=D)
APART: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros of as many rows": lambda h, x: torch.cat([h[:, :2], torch.zeros(len(h), 1, dtype=D), x[:, :1]], 1),
    "all rows in a line": lambda h, x: (h.flatten() * 2 + x.reshape(-1)).view(len(h), -1),
    "heads": heads,
    "convolution": lambda h, x: torch.nn.functional.conv1d(h.unsqueeze(1), KERNEL, padding=1).sum(1) + x,
    "layer norm": lambda h, x: torch.nn.functional.layer_norm(h + x, (4,)),
    "sorted": lambda h, x: h.sort(-1).values + x,
    "running sum": lambda h, x: h.cumsum(-1) - x.flip(1),
    "written columns": written_columns,
    "by their mean": lambda h, x: torch.where(h.mean(1, keepdim=True) > 0, h, x),
}


@pytest.mark.parametrize("name", APART)
def test_bodies_whose_rows_stay_apart(name: str):
    values, init, lens = leaf(D, 15, 4), leaf(D, 5, 4), [5, 1, 3, 2, 4]

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(APART[name](h, x) + 1.1 * h)
        return h, h

    def run(compile: Any) -> list[Tensor]:
        h, ys = tl.scan(body, init, PackedTensor(values, lens), compile=compile)
        return [h, ys.values, *torch.autograd.grad(h.sin().sum() + ys.values.cos().sum(), (values, init))]

    check_equal(run("strict"), run(False), 1e-11)


# -- what does not do without rows that are gone


def refused(body: Callable[..., Any], reason: str, lens: list[int] = LENS, **options: Any) -> None:
    """The loop says why it is not compiled, and is then an eager one."""
    values, init = leaf(D, sum(lens), 4), leaf(D, len(lens), 4)

    def run(compile: Any) -> list[Any]:
        torch.manual_seed(0)
        h, ys = tl.scan(body, init, PackedTensor(values, lens), compile=compile, **options)
        return [h, ys.values, *torch.autograd.grad(h.sin().sum() + ys.values.cos().sum(), (values, init))]

    expected = run(False)
    with pytest.warns(NotCompiledWarning, match=reason):
        found = run(True)
    check_equal(found, expected, 0.0)
    with pytest.raises(RuntimeError, match=reason):
        run("strict")


MIXES = "the body makes one row of others"
COUNTS = "what the body does depends on how many there are"


def mean_of_h(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x) - h.mean(0), h


def mean_of_x(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x - x.mean(0)), h


def neighbours(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h.roll(1, 0) + x), h


def middle_row(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + h[len(h) // 2]), h


def products_of_rows(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + (h @ h.T).sum(1, keepdim=True)), h


def y_of_all(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x), (h + x).cumsum(0)


def over_the_number(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x / len(h)), h


def branch_on_the_number(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x) if len(h) > 3 else torch.cos(h + x), h


def numbered_rows(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + torch.arange(len(h)).view(-1, 1)), h


def spaced_rows(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + torch.linspace(0, 1, len(h), dtype=D).view(-1, 1)), h


def number_as_a_tensor(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x * torch.tensor(len(h))), h


def as_many_columns(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + WEIGHTS[:, : len(h)].sum()), h


def shifted_by_the_number(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h.roll(len(h), 1) + x), h


def numbered_column(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + h[:, len(h) // 2].unsqueeze(1)), h


def rows_in_turn(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + x + WEIGHTS[:2, :4].repeat(len(h), 1)[: len(h)]), h


WEIGHTS = torch.linspace(0, 1, 32, dtype=D).view(4, 8)


@pytest.mark.parametrize("body", [mean_of_h, mean_of_x, neighbours, middle_row, products_of_rows, y_of_all])
def test_rows_that_meet_are_refused(body: Callable[..., Any]):
    refused(body, MIXES)


@pytest.mark.parametrize(
    "body",
    [
        *(over_the_number, branch_on_the_number, numbered_rows, spaced_rows, number_as_a_tensor, as_many_columns),
        *(shifted_by_the_number, numbered_column, rows_in_turn),
    ],
)
def test_bodies_that_ask_for_the_number_of_rows_are_refused(body: Callable[..., Any]):
    refused(body, COUNTS, [3, 1, 3, 1])


@pytest.mark.parametrize("body", [mean_of_h, mean_of_x, neighbours, over_the_number, numbered_rows])
def test_they_are_not_where_no_row_leaves(body: Callable[..., Any]):
    values, init = leaf(D, 12, 4), leaf(D, 4, 4)
    found = [tl.scan(body, init, PackedTensor(values, [3] * 4), compile=kind) for kind in ("strict", False)]
    (h, ys), (true_h, true_ys) = found
    check_equal([h, ys.values], [true_h, true_ys.values], 1e-12)


def test_a_mean_over_the_context_is_refused():
    def body(h: Tensor, x: Tensor, scale: Tensor) -> Any:
        return torch.sin(h + x * scale.mean(0)), h

    refused(body, MIXES, context=torch.randn(len(LENS), 4, dtype=D))


@pytest.mark.parametrize(
    ("context", "kind"),
    [
        (tl.TensorArray.unstack(torch.ones(2, len(LENS), 4, dtype=D)), "TensorArray"),
        (PackedTensor(torch.ones(18, 4, dtype=D), [3] * 6), "PackedTensor"),
    ],
    ids=["array", "packed"],
)
def test_a_context_of_other_kinds_is_refused(context: Any, kind: str):
    def body(h: Tensor, x: Tensor, context: Any) -> Any:
        return torch.sin(h + x) + (context[0] if kind == "TensorArray" else context.sum(1)), h

    refused(body, f"the context, which rows leave, holds a {kind}", context=context)


def test_random_numbers_are_refused():
    refused(
        lambda h, x: (torch.sin(h + x * torch.rand_like(x)), h), "random numbers are drawn in a loop over packed xs"
    )


def test_a_closed_over_tensor_of_all_rows_is_the_eager_loops_error():
    scale, xs = torch.ones(3, 3), PackedTensor(torch.ones(5, 3), [1, 2, 2])
    for compile in (False, "strict"):
        with pytest.raises(RuntimeError, match="must match the size"):
            tl.scan(lambda h, x: (h + x * scale, h), torch.zeros(3, 3), xs, compile=compile)


def test_an_output_without_the_rows_of_its_step_is_the_eager_loops_error():
    xs = PackedTensor(torch.ones(3, 3), [1, 2])
    for compile in (False, "strict"):
        with pytest.raises(ValueError, match="an output has the rows of its step"):
            tl.scan(lambda h, x: (h + x, h.sum()), torch.zeros(2, 3), xs, compile=compile)


def test_explain_says_what_becomes_of_rows():
    xs, zeros = PackedTensor(torch.ones(3, 3), [1, 2]), torch.zeros(2, 3)
    text = str(tl.explain(lambda h, x: (torch.sin(h + x), h), zeros, xs))
    assert "rows that have ended stay in the batch, masked: 2 of them" in text
    even = tl.explain(lambda h, x: (torch.sin(h + x), h), zeros, PackedTensor(torch.ones(4, 3), [2, 2]))
    assert even.compiled
    assert "ended" not in str(even)
    assert MIXES in str(tl.explain(mean_of_h, zeros, xs))


# -- rows that stop by a condition, with compact=True


@pytest.mark.parametrize("checkpoints", [None, 1, 3])
@pytest.mark.parametrize("limits", [[3, 9, 0, 2], [0, 4, 0], [5, 5], [1], [2, 1, 1, 1, 1, 7]], ids=str)
@pytest.mark.extended("[5, 5]", "[0, 4, 0]")
def test_compact_gives_what_the_eager_loop_gives(limits: list[int], checkpoints: int | None):
    turn, h, scale = rotation(D), leaf(D, len(limits), 4), leaf(D, len(limits), 4)
    context = {"limit": torch.tensor(limits), "scale": scale, "shared": torch.tensor(0.5, dtype=D)}

    def body(state: Any, context: Any) -> Any:
        h, n, shared = state
        h = torch.sin(h @ turn + context["scale"] * context["shared"]) / (context["limit"] > 0).to(D).view(-1, 1)
        return h, n + 1, shared + 1

    def run(compile: Any) -> list[Any]:
        init = h, torch.zeros(len(limits), dtype=torch.int64), torch.zeros((), dtype=D)
        (last, n, shared), steps = tl.while_loop(
            lambda state, context: state[1] < context["limit"],
            *(body, init),
            context=context,
            compact=True,
            return_steps=True,
            checkpoints=checkpoints,
            compile=compile,
        )
        return [last, n, shared, steps, *torch.autograd.grad(last.cos().sum(), (turn, h, scale))]

    expected = run(False)
    assert expected[3].tolist() == limits
    check_equal(run("strict"), expected, 1e-11)


def test_compact_refuses_rows_that_meet():
    def run(compile: Any, body: Callable[[Tensor], Tensor]) -> Tensor:
        start = torch.tensor([[0.3], [1.0], [2.5]])
        return tl.while_loop(lambda h: h[:, 0] < 3, body, start, compact=True, compile=compile)

    for body, reason in (
        (lambda h: h + 0.1 + h.mean(0).abs(), MIXES),
        (lambda h: h + 1 / len(h), COUNTS),
    ):
        with pytest.warns(NotCompiledWarning, match=reason):
            found = run(True, body)
        torch.testing.assert_close(found, run(False, body))
        with pytest.raises(RuntimeError, match=reason):
            run("strict", body)
