"""Loops whose steps are known by what they read in Python: what has changed since is seen, wherever it stands."""

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.known_reads import known_reads
from tests.support import read_cases_of_modules as more
from tests.support.read_cases import CASES, Above, Adding, Config, Count, patched

assert more.IS_ON  # so that its cases are among CASES
XS = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(6, 1).repeat(1, 2)


@pytest.fixture(autouse=True)
def _put_back() -> Any:
    yield
    while patched:
        setattr(*patched.pop())


@pytest.mark.parametrize("how", [{"compile": True}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
@pytest.mark.parametrize("name", CASES)
def test_what_has_changed_since_is_seen(name: str, how: dict[str, Any]) -> None:
    count = Count()
    run, change = CASES[name](count)
    init = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def scanned(**options: Any) -> Tensor:
        return tl.scan(lambda c, x: (run(c) + x, None), init, XS, **options)[0]

    expected = scanned()
    for _ in range(3):
        torch.testing.assert_close(scanned(**how), expected)
    change()
    count.n = 0
    if "checkpoints" in how:
        with pytest.raises(RuntimeError, match=r"the attribute n to which|registers a hook"):
            scanned(**how)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
        found = scanned(**how)
    after, count.n = count.n, 0
    assert after == len(XS)  # each step has counted, the looks have not
    torch.testing.assert_close(found, scanned())


def followed(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    begun, made = 0, Judge.__init__

    def init(self: Judge, *args: Any, **kwargs: Any) -> None:
        nonlocal begun
        begun += 1
        made(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Judge, "__init__", init)
        run()
    return begun


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), Above()])
        self.options = types.SimpleNamespace(scale=0.5, names=["a", "b"])

    def mixed(self, h: Tensor, *, twice: bool = False) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h * 2 if twice else h

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = {name: self.mixed(h) for name in self.options.names}
        return sum(parts.values(), Adding(h).twice) * self.options.scale + x, h


@pytest.mark.parametrize("how", [{"compile": "strict"}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
def test_a_step_that_is_known_is_not_followed_again(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known_reads.clear()
    cell, init = Cell(), torch.ones(2, dtype=torch.float64)

    def run() -> None:
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)  # another one at each call
        tl.scan(lambda c, x: cell(c * w, x), init, XS, **how)

    assert followed(run, monkeypatch) > 0
    assert followed(run, monkeypatch) == followed(run, monkeypatch) == 0


@pytest.mark.parametrize("how", [{"compile": "strict"}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
def test_another_structure_of_the_carry_is_another_step(how: dict[str, Any]) -> None:
    def body(c: Any, x: Tensor) -> Any:
        first, second = c.values() if isinstance(c, dict) else c
        new = (first + x, second * first.sin()) if isinstance(c, tuple) else (first - x, second)
        return (dict(zip(c, new, strict=True)) if isinstance(c, dict) else new), None

    a, b = (torch.full((2,), v, dtype=torch.float64) for v in (1.0, 2.0))
    for init in ((a, b), {"a": a, "b": b}, (a, b), {"b": a, "a": b}):
        found, expected = tl.scan(body, init, XS, **how)[0], tl.scan(body, init, XS)[0]
        torch.testing.assert_close(found, expected)


def test_known_steps_hold_no_objects() -> None:
    import gc
    import weakref

    def one() -> list[weakref.ref[Any]]:
        cell, config, w = Cell(), Config(), torch.ones(2, dtype=torch.float64)

        def body(c: Tensor, x: Tensor) -> Any:
            return (cell(c, x)[0] * w if not config.on else c), None

        ways: list[Any] = [{"compile": True}, {"checkpoints": 2}]
        for how in ways:
            tl.scan(body, torch.ones(2, dtype=torch.float64, requires_grad=True), XS, **how)
        return [weakref.ref(x) for x in (cell, config, w, body)]

    held = one()
    gc.collect()
    assert [x() for x in held] == [None] * len(held)


TOLD: dict[str, Callable[[Any], Any]] = {
    "item": lambda c: c[0].item() > 3,
    "bool": lambda c: bool((c > 3).all()),
    "float": lambda c: float(c[0].detach()) > 3,
    "tolist": lambda c: max(c.tolist()) > 3,
    "numpy": lambda c: c.detach().numpy().max() > 3,
    "mask": lambda c: c[c > 3].shape[0] > 0,
    "nonzero": lambda c: len((c > 3).nonzero()) > 0,
    "where": lambda c: torch.where(c > 3)[0].numel() > 0,
    "masked_select": lambda c: c.masked_select(c > 3).numel() > 0,
    "unique": lambda c: torch.unique(torch.cat([c > 3, c > 99])).numel() > 1,
    "repeat": lambda c: c.repeat_interleave((c > 3).long()).numel() > 0,
    "repeats by name": lambda c: c.repeat_interleave(repeats=(c > 3).long()).numel() > 0,
    "repeats alone": lambda c: torch.repeat_interleave((c > 3).long()).numel() > 0,
    "where by name": lambda c: torch.where(condition=c > 3)[0].numel() > 0,
    "classes": lambda c: nn.functional.one_hot((c > 3).long()).shape[-1] > 1,
    "mask of a dim": lambda c: c[None][:, c > 3].shape[1] > 0,
    "end of a slice": lambda c: c[: (c > 3).long()[0]].numel() > 0,
    "size": lambda c: torch.zeros((c > 3).long()[0]).numel() > 0,
    "size of a view": lambda c: c[:1].expand((c > 3).long()[0]).numel() > 0,
    "range": lambda c: torch.arange((c > 3).long()[0]).numel() > 0,
    "cut": lambda c: torch.tensor_split(c, (c > 3).long()[:1])[0].numel() > 0,
    "equal": lambda c: not torch.equal(c.clamp(max=3), c),
    "str": lambda c: "True" in str(c > 3),
    "index": lambda c: [False, True][(c > 3).long().max()],
}


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("name", TOLD)
def test_steps_are_followed_as_long_as_numbers_may_say_where_they_go(name: str, again: bool) -> None:
    count, init = Count(), torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def body(c: Tensor, x: Tensor) -> Any:
        return (count.impure(c) if TOLD[name](c) else c) + 1, None

    if again:
        tl.scan(body, init, XS[:3], checkpoints=2)
    with pytest.raises(RuntimeError, match="the attribute n to which"):
        tl.scan(body, init, XS, checkpoints=2)


@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_a_step_that_went_another_way_for_other_numbers_is_followed() -> None:
    seen = list[int]()

    def body(c: Tensor, x: Tensor) -> Any:
        if c.sum() > 0:
            seen.append(1)
        return c - 1, None

    for start, times in ((-1.0, 0), (-1.0, 0), (2.5, 3), (2.5, 3)):
        seen.clear()
        tl.scan(body, torch.full((2,), start, dtype=torch.float64), XS, compile=True)
        assert len(seen) == times


NOT_TOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda c: c.split(1)[0],
    "where": lambda c: torch.where(c > 0, c, -c),
    "index": lambda c: c[torch.tensor([1, 0])],
    "slice": lambda c: c[1:],
    "repeat": lambda c: c.repeat_interleave(2)[:2],
    "largest": lambda c: c.topk(1)[0],
    "view": lambda c: c.view(1, 2)[0].reshape(-1),
}


@pytest.mark.eager_only("loops with checkpoints", run=False)
@pytest.mark.parametrize("name", NOT_TOLD)
def test_sizes_that_no_number_decides_are_not_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known_reads.clear()
    plain, init = True, torch.ones(2, dtype=torch.float64, requires_grad=True)
    body: Any = lambda c, x: (c + (NOT_TOLD[name](c).sum() if plain else c), None)  # noqa: E731
    assert followed(lambda: tl.scan(body, init, XS, checkpoints=2), monkeypatch) == 2


@pytest.mark.eager_only("loops with checkpoints", run=False)
def test_a_branch_that_no_step_takes_does_not_have_all_steps_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    known_reads.clear()
    plain, init = True, torch.ones(2, requires_grad=True)
    body: Any = lambda c, x: (c.sin() if plain else c.cos(), None)  # noqa: E731
    run = lambda: tl.scan(body, init, torch.ones(50, 2), checkpoints=2)  # noqa: E731
    assert followed(run, monkeypatch) == 2
    assert followed(run, monkeypatch) == 0


@pytest.mark.parametrize("by_name", [False, True], ids=["place", "name"])
def test_places_that_are_a_tensor_are_read_at_each_step(by_name: bool) -> None:
    """torch reads them below every mode: a plan would cut all steps where it cut the first."""

    def body(c: Tensor, x: Tensor) -> Any:
        at = (c > 2).long()[:1]
        parts = torch.tensor_split(c, tensor_indices_or_sections=at) if by_name else c.tensor_split(at)
        return c + 1, parts[0].sum() + x.sum() * 0

    init = torch.zeros(2, dtype=torch.float64)
    with pytest.warns(UserWarning, match="tensor_split reads the numbers of a tensor"):
        found = tl.scan(body, init, XS, compile=True)
    wanted = tl.scan(body, init, XS, compile=False)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
