"""Lines that call modules with parts and installed packages: one's own line, the part's name, the package's line."""

import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorloop as tl
from tensorloop.memory import growth, saved_residuals, track
from tensorloop.memory.counting.allocator import replayed

FLOAT, B, D = 4, 2, 8
LIBRARY = """
import torch
from torch import nn


def rotated(x):
    for _ in range(2):
        x = torch.sin(x)  # library
    return x


def applied(fn, x):
    return fn(x) + 1


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self, size, n):
        super().__init__()
        self.layers = nn.ModuleList([Block(size) for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))
"""


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    folder = tmp_path / "lib" / "site-packages" / "somelib"
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("somelib.parts", folder / "parts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Tanh(), nn.Linear(D, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)  # encoded
        return self.head(x)  # head


def parts(sites: Any, mark: str) -> dict[str, Any]:
    """The sites of the marked line, by the part of the module."""
    return {site.module: site for site in sites if site.code.endswith(f"# {mark}")}


# -- parts of modules


def test_parts_of_a_module_have_their_names():
    model, x = Model(), torch.randn(B, 5, D)
    kept = saved_residuals(lambda: model(x).sum())
    encoded, head = (parts(kept.by_line(), mark) for mark in ("encoded", "head"))
    assert {f"encoder.layers.{i}.{part}" for i in range(4) for part in ("self_attn", "norm1")} <= encoded.keys()
    assert "head.1.0" in head
    assert str(encoded["encoder.layers.3.self_attn"]).endswith(" (encoder.layers.3.self_attn)")
    assert encoded["encoder.layers.3.self_attn"].as_dict()["module"] == "encoder.layers.3.self_attn"
    assert "head.1.0" in str(kept)
    layers = [sum(n for site, n in kept.by_line().items() if f"layers.{i}." in site.module) for i in range(4)]
    assert layers[0] == layers[1] == layers[2] > 0


def test_a_sequential_is_told_apart_by_its_numbers_and_a_module_without_parts_is_not():
    layers, alone = nn.Sequential(*(nn.Linear(D, D) for _ in range(3))), nn.Linear(D, D)
    with track() as tracker:
        y = layers(torch.ones(B, D))  # several
        z = alone(y).sum()  # one
        z.backward()
    sites = [entry.site for entry in tracker.sites()]
    assert set(parts(sites, "several")) == {"", "Sequential.0", "Sequential.1", "Sequential.2"}  # "": the ones
    assert set(parts(sites, "one")) == {""}
    gradients = {entry.site.module: entry.live for entry in tracker.sites() if entry.backward}
    assert gradients["Sequential.1"] == (D * D + D) * FLOAT


def test_another_module_in_the_place_of_one_that_is_gone_has_its_own_name():
    def run() -> set[str]:
        with track() as tracker:
            for size in (1, 2, 3, 4):
                layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(size)))
                layers(torch.ones(B, D)).sum().backward()  # made anew
                del layers
        return {entry.site.module for entry in tracker.sites() if entry.backward and entry.peak}

    assert run() <= {"", *(f"Sequential.{i}" for i in range(4))}


def test_finding_the_name_keeps_nothing_alive():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Sequential(nn.Identity(), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            seen.append(weakref.ref(y))
            z = self.two(y)
            del y
            alive.append(seen[0]() is not None)
            return z

    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    model = Halves()
    with track() as tracker, torch.no_grad():
        model(torch.ones(D))
    assert alive == [False]
    assert "two.1" in {line.site.module for line in tracker.storages.lines}  # pyright: ignore
    found = weakref.ref(model)
    del model
    assert found() is None


def test_the_same_part_is_one_line_at_every_T():
    def make(T: int) -> Callable[[], Tensor]:
        model, xs = nn.Sequential(nn.Linear(D, D), nn.Tanh()), torch.randn(T, B, D)
        return lambda: sum((model(x).sum() for x in xs.unbind(0)), torch.zeros(()))  # each

    (line,) = (line for line in growth(make, (8, 16, 32)).lines if line.site.module == "Sequential.1")
    assert line.saved == tuple(T * B * D * FLOAT for T in (8, 16, 32))
    assert line.exponent == pytest.approx(1)


# -- installed packages


def test_a_package_s_line_stands_beside_one_s_own(library: ModuleType):
    x = torch.randn(D, requires_grad=True)
    with track() as tracker:
        y = library.rotated(x)  # own
        y.sum().backward()
    (site,) = {entry.site for entry in tracker.sites() if entry.site.code.endswith("# own")}
    assert (site.file, site.function) == (__file__, "test_a_package_s_line_stands_beside_one_s_own")
    assert site.library is not None
    assert str(site.library) == "somelib/parts.py:8"
    assert site.own_code == "x = torch.sin(x)  # library"
    assert str(site).endswith(" via somelib/parts.py:8")
    assert site.as_dict()["library"]["file"] == "somelib/parts.py"
    assert {entry.backward for entry in tracker.sites() if entry.site == site} == {True, False}


def test_a_function_of_one_s_own_that_a_package_calls_has_its_own_line(library: ModuleType):
    def mine(x: Tensor) -> Tensor:
        return x.sin()  # mine

    x = torch.ones(D, requires_grad=True)
    kept = saved_residuals(lambda: library.applied(mine, x * 2).sum())
    saved = [entry.saved_at for entry in kept.entries]
    assert [site and (site.code, site.library) for site in saved] == [("return x.sin()  # mine", None)]


def test_a_model_of_a_package_has_lines_and_parts(library: ModuleType):
    model = library.Stack(D, 3)
    kept = saved_residuals(lambda: model(torch.ones(B, D)).sum())  # stack
    found = {(site.module, str(site.library)) for site in kept.by_line() if site.library}
    assert found == {(f"Stack.layers.{i}", "somelib/parts.py:22") for i in range(3)}


def test_a_backward_of_a_package_belongs_to_the_line_of_its_forward(library: ModuleType):
    x = torch.randn(D, requires_grad=True)
    with track() as tracker:
        library.Swish.apply(x * 2).sum().backward()  # swish
    backward = {entry.site for entry in tracker.sites() if entry.backward}
    assert all(site.code.endswith("# swish") for site in backward)


def test_code_without_a_line_of_one_s_own_has_the_package_s():
    frames = [{"filename": "/x/site-packages/a/b.py", "line": 3, "name": "f"}]
    events = [{"action": "alloc", "addr": 1, "size": 64, "frames": frames}]
    (((site, backward), sizes),) = replayed(events).items()
    assert (site.path, site.line, site.library, backward, sizes) == ("a/b.py", 3, None, False, [64, 64, 1])


def test_an_allocator_s_history_names_both_lines():
    frames = [
        {"filename": torch.__file__, "line": 1, "name": "op"},
        {"filename": "/x/site-packages/a/b.py", "line": 3, "name": "f"},
        {"filename": __file__, "line": 1, "name": "g"},
    ]
    events = [{"action": "alloc", "addr": 1, "size": 64, "frames": frames}]
    (((site, _), _),) = replayed(events).items()
    assert (site.file, str(site.library)) == (__file__, "a/b.py:3")


# -- advice on attention


def over_all_pairs(**options: Any) -> Callable[[int], Callable[[], Tensor]]:
    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(1, 2, T, D, requires_grad=True)
        return lambda: F.scaled_dot_product_attention(x, x, x[..., : options.get("Dv", D)], **given(T)).sum()  # pairs

    def given(T: int) -> dict[str, Any]:
        mask = {"attn_mask": torch.zeros(T, T, requires_grad=True)} if "mask" in options else {}
        return {name: value for name, value in options.items() if name == "dropout_p"} | mask

    return make


def through_a_module(T: int) -> Callable[[], Tensor]:
    attention = nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True)
    x = torch.randn(1, T, D)
    return lambda: attention(x, x, x, need_weights=False)[0].sum()  # pairs


def over_an_encoder(T: int) -> Callable[[], Tensor]:
    cell, memory = nn.GRUCell(D, D), torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        h, loss = torch.zeros(B, D), torch.zeros(())
        for _ in range(T):
            weights = torch.einsum("tbd,bd->tb", memory, h).softmax(0)  # pairs
            h = cell(torch.einsum("tb,tbd->bd", weights, memory), h)
            loss = loss + h.square().sum()
        return loss

    return fn


def over_its_own_past(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        past, loss = tl.TensorArray(capacity=T), torch.zeros(())
        for x in xs.unbind(0):
            past.append(x)
            weights = torch.einsum("tbd,bd->tb", past[:], x).softmax(0)  # pairs
            loss = loss + torch.einsum("tb,tbd->bd", weights, past[:]).square().sum()
        return loss

    return fn


def gathered_from_an_encoder(T: int) -> Callable[[], Tensor]:
    memory, order = torch.randn(T, B, D, requires_grad=True), torch.arange(T).flip(0)

    def fn() -> Tensor:
        h = torch.zeros(B, D)
        for _ in range(T):
            h = torch.sin(h + memory.index_select(0, order).square().sum(0))  # pairs
        return h.sum()

    return fn


ADVICE = {
    "dropout": (over_all_pairs(dropout_p=0.1), "With dropout_p=0", "nor does nn.MultiheadAttention"),
    "dropout in a module": (through_a_module, "dropout=0 in nn.MultiheadAttention", "need_weights=False"),
    "a mask with gradient": (over_all_pairs(mask=True), "has no kernel for this call", "dropout"),
    "narrow values": (over_all_pairs(Dv=4), "tl.attention(q, k, v) keeps none", "dropout"),
    "an encoder": (over_an_encoder, "such as an encoder's states", "TensorArray"),
    "its own past": (over_its_own_past, "tl.attention(q, keys, values)", "encoder"),
    "gathered": (gathered_from_an_encoder, "gathered once, before the loop", "The whole history"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_on_attention(name: str):
    make, told, untold = ADVICE[name]
    found = growth(make, (32, 64, 128))
    (line, *_) = (line for line in found.lines if line.site.code.endswith("# pairs") and line.advice)
    assert told in str(line.advice)
    assert untold not in str(line.advice)


def test_attention_that_keeps_no_weights_is_not_told():
    found = growth(over_all_pairs(), (32, 64, 128))
    assert not any(line.exponent > 1.2 for line in found.lines)


def test_what_the_advice_says_of_attention_is_so():
    T = 128

    def kept(fn: Callable[[], Tensor]) -> int:
        return saved_residuals(fn).bytes

    weights = 2 * T * T * FLOAT
    assert kept(over_all_pairs(dropout_p=0.1)(T)) >= weights > kept(over_all_pairs(dropout_p=0.0)(T))
    x = torch.randn(1, T, 2, D, requires_grad=True)
    assert kept(lambda: tl.attention(x, x, x[..., :4]).sum()) < weights
    q, k = torch.randn(1, 2, 1, D, requires_grad=True), torch.randn(1, 2, T, D, requires_grad=True)
    assert kept(lambda: F.scaled_dot_product_attention(q, k, k).sum()) < 2 * T * FLOAT
