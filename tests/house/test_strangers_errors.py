"""What a newcomer gets wrong: every message names the function that was called, the argument, and what mends it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl

SEQUENCE = nn.utils.rnn.pack_sequence([torch.ones(5, 3), torch.ones(2, 3)])
JAGGED = torch.nested.nested_tensor([torch.ones(5, 3), torch.ones(2, 3)], layout=torch.jagged)
XS, Z, ONE = torch.ones(5, 3), torch.zeros(3), torch.ones(3)
P = tl.PackedTensor(torch.ones(6, 3), [2, 4])
META: Any = torch.ones(8, 8, dtype=torch.bool, device="meta")
w = torch.ones(4, requires_grad=True)
tl_: Any = tl  # what a checker would refuse


def add(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return c + x, c


class Sum(nn.Module):
    total = None

    def forward(self, x: Tensor) -> Tensor:
        self.total = x if self.total is None else self.total + x
        return self.total


def carrying() -> Any:
    return tl.carrying(Sum())


def search(step: Any = None, **options: Any) -> Any:
    def plain(h: Any, tokens: Tensor) -> Any:
        return h, torch.zeros(*tokens.shape, 4).log_softmax(-1)

    given = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 3, **options}
    return tl_.beam_search(step or plain, given.pop("init", torch.zeros(2, 8)), **given)


LOOPS: list[tuple[Callable[[], Any], str]] = [
    (lambda: tl_.explain("f", Z, XS), "explain: body_fn must be callable, got str 'f'"),
    (lambda: tl.explain(add, Z, XS, length=9), "explain: length is 9, but xs has length 5"),
    (lambda: tl_.explain(add, Z, XS, axis=1), "explain: there is no argument axis=; here that is dim="),
    (lambda: tl_.explain(add, Z, XS, compile=True), "explain: there is no argument compile=; it says what"),
    (lambda: tl.explain(lambda c, x: (c.double(), x), Z, XS), "explain: the body changed the carry at step 0"),
    (lambda: tl_.explain(add, Z, XS, checkpoints="4"), "explain: checkpoints must be None, an int"),
    (lambda: carrying().map(Sum()), "carrying.map: nothing says when to stop"),
    (lambda: carrying().map(lambda a, b: a, XS), r"carrying.map: fn is called as fn\(x\), but takes \(a, b\)"),
    (lambda: carrying().map(Sum(), XS, axis=0), "carrying.map: there is no argument axis=; here that is dim="),
    (lambda: carrying().map(Sum(), XS, checkpoints=0), "carrying.map: checkpoints must be at least 1"),
    (lambda: carrying().map(Sum(), P), "carrying.map: xs is packed, where rows end at steps of their own"),
    (lambda: carrying().scan(lambda c, x: c, Z, XS), r"carrying.scan: body_fn must return \(carry, y\)"),
    (lambda: carrying().scan(lambda c: c, Z, XS), r"carrying.scan: body_fn is called as body_fn\(carry, x\)"),
    (lambda: carrying().while_loop(lambda c: c < 1, add, Z), r"carrying.while_loop: cond_fn gave .* reduce it to one"),
    (lambda: carrying().fori_loop(0, 2.5, add, Z), "carrying.fori_loop: upper must be an int"),
    (lambda: tl_.scan(add, Z, XS.numpy()), "scan: xs is ndarray .*Wrap it with torch.as_tensor"),
    (
        lambda: tl_.scan(add, Z, SEQUENCE),
        r"scan: xs is a PackedSequence; give tl.PackedTensor.from_packed_sequence\(xs\)",
    ),
    (lambda: tl_.explain(add, Z, SEQUENCE), "explain: xs is a PackedSequence; give"),
    (lambda: tl_.map(abs, SEQUENCE), "map: xs is a PackedSequence; give"),
    (lambda: carrying().map(Sum(), SEQUENCE), "carrying.map: xs is a PackedSequence; give"),
    (lambda: tl.scan(add, Z, JAGGED), r"scan: xs is a nested tensor; .*tl.PackedTensor.from_nested\(xs\)"),
    (lambda: tl_.Checkpoints(budget="1 Gib of it"), 'Checkpoints: budget=.* is no size; write "200 MiB"'),
    (lambda: tl_.scan(add, Z, XS, checkpoints="8"), "scan: checkpoints must be None, .* checkpoints=8 keeps 8 carries"),
    (lambda: tl_.scan(add, Z, (x for x in XS)), r"scan: xs is generator .*torch.stack\(list\(xs\)\)"),
    (lambda: tl_.scan(add, Z, XS, until=lambda c: np.bool_(True)), r"until must return .*wrap it with bool\(...\)"),
    (lambda: tl_.scan(lambda c, x: (c, x.numpy()), Z, XS), "scan: y is ndarray; .*torch.as_tensor"),
    (lambda: tl.scan(lambda c, x: (c + 1, c.to((Z.dtype, torch.float64)[int(c[0])])), Z, XS), r"\(3,\) float32 cpu\n"),
    (lambda: tl_.while_loop(lambda c: c.sum() < 2, add, Z, progress="x"), "while_loop: progress must be True or False"),
    (lambda: tl_.while_loop(lambda c: c < 2, add, Z, compact="x"), "while_loop: compact must be True or False"),
    (lambda: tl_.while_loop(lambda c: c < 2, add, Z, return_steps=1), "while_loop: return_steps must be True or"),
    (lambda: tl_.scan(add, Z, XS, until=lambda c: c.sum() > 2, compact=1), "scan: compact must be True or False"),
    (
        lambda: tl.while_loop(lambda c: c.sum() < 3, lambda c: c, META.float()),
        "cond_fn gave a tensor on the meta device",
    ),
    (lambda: tl.linear_recurrence(META.float(), torch.ones(8, 8)), "linear_recurrence: a is on meta, b on cpu"),
    (lambda: tl_.Checkpoints(k=3, offlaod="cpu"), "Checkpoints: there is no argument offlaod=; did you mean offload="),
]

TENSORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: tl.TensorArray(device="gpu"), "TensorArray: device must be a torch.device or a name such as 'cpu'"),
    (lambda: tl_.TensorArray().append(P), r"TensorArray.append: .*; give its .values, or .pad\(\)"),
    (lambda: tl_.pack_padded(SEQUENCE, [2, 1]), r"pack_padded: .*give tl.PackedTensor.from_packed_sequence\(x\)"),
    (lambda: tl.pack_padded(JAGGED, [2, 1]), r"pack_padded: .*a nested one; tl.PackedTensor.from_nested\(x\)"),
    (lambda: tl_.TensorArray().extend(x for x in [ONE, "a"]), "TensorArray.extend: slot 1: expected a tensor"),
    (lambda: tl_.TensorArray.unstack([ONE, ONE]), "unstack: values: expected .*make one of them with torch.stack"),
    (lambda: tl_.TensorArray.unstack(XS).stack(dim=1), "stack: there is no argument dim=; it takes none"),
    (lambda: tl_.PackedTensor(torch.ones(6), np.array([2, 4])), "PackedTensor: lens .*wrap it with torch.as_tensor"),
    (lambda: tl_.PackedTensor(torch.ones(6), (x for x in [2, 4])), "PackedTensor: lens .*make a list of it"),
    (lambda: tl_.PackedTensor(torch.ones(6), 6), r"PackedTensor: lens .*write \[6\]"),
    (lambda: tl.pack_padded(XS, torch.ones(5, 3) > 0), r"pack_padded: lens .* the lengths of a mask are mask.sum\(1\)"),
    (lambda: tl.PackedTensor.from_list([ONE, ONE.long()]), r"from_list: rows\[1\] has dtype .*convert with .to\(\)"),
    (lambda: tl_.PackedTensor.pad(P, "x"), "pad: value must be a number, got str 'x'"),
    (lambda: tl_.packed.collate({"a": ONE} for _ in range(2)), "collate: examples must be a list of examples, got gen"),
    (lambda: tl_.edit_distance([[1]], [[1]], align="x"), "edit_distance: align must be True or False"),
    (lambda: tl_.packed.pairs(XS, XS), "pairs: a must be a PackedTensor, got .*; pack_padded makes one"),
    (lambda: tl_.scan(lambda c, x: ((c[0],), x), [Z], XS), r"  \+ \(\*,\)\nReturn the same containers"),
    (lambda: tl_.packed.collate("abc"), "collate: examples must be a list of examples, got str 'abc'"),
    (lambda: tl_.packed.collate([{"a": ONE}], stack="a"), r"collate: stack must be a list .*write \['a'\]"),
    (lambda: tl_.packed.collate([{"a": ONE}, ONE]), r"collate: examples\[1\] is a tensor .*the keys \['a'\]"),
    (lambda: search(lambda h: h), r"beam_search: step_fn is called as step_fn\(carry, tokens\), but takes \(h\)"),
    (lambda: search(lambda h, t: (h.double(), h)), "beam_search: step_fn changed the carry .*in init_carry"),
    (lambda: search(init=torch.zeros(2, 8, device="meta")), "beam_search: init_carry is on the meta device"),
    (lambda: search(compact="a"), "beam_search: compact must be True or False"),
    (lambda: tl_.beam.Sample(generator=3), "Sample: generator must be a torch.Generator, got int 3"),
    (lambda: tl.ordering.best(np.ones((8, 8))), "best: graph must be .*wrap it with torch.as_tensor"),
    (lambda: tl.ordering.best([(0, 1)]), "best: graph must be .*Graph.from_edges"),
    (lambda: tl.ordering.best(META), "best: graph is on the meta device"),
    (
        lambda: tl.ordering.best(mask_mod=lambda q, k: q >= k, shape=8),
        r"best: mask_mod is called as mask_mod\(b, h, q, kv\), but takes",
    ),
    (lambda: tl_.memory.saved_bytes(w.sin()), "saved_bytes: fn must be a function; got Tensor"),
    (lambda: tl_.memory.growth(lambda T: w.sin, (1, 2), measure="peak"), "growth: measure must be a function"),
    (lambda: tl_.testing.assert_linear_memory(lambda T: w.sin(), (1, 2)), r"make_fn\(1\) must give a function"),
    (lambda: tl_.testing.assert_saved_bytes(w.sin(), exactly=4), "assert_saved_bytes: fn must be a function"),
    (lambda: tl_.memory.growth(lambda T: w.sin, (1, 2), progress="x"), "growth: progress must be True or False"),
    (lambda: tl.memory.timeline(lambda: w.sin(), interval=0), "timeline: interval must be a number of seconds above 0"),
    (lambda: tl_.memory.timeline(w.sin()), "timeline: fn must be a function; got Tensor"),
    (lambda: tl_.memory.mark(3).__enter__(), "mark: name must be a string, got 3"),
    (lambda: tl.memory.track("gpu").__enter__(), "track: device must be a torch.device or a name"),
]


@pytest.mark.parametrize(("call", "message"), [*LOOPS, *TENSORS])
def test_what_a_message_says(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert caught.match(f"(?s){message}")


def test_loops_inside_of_carrying_and_explain_keep_their_own_name() -> None:
    def body(c: Tensor, x: Tensor) -> Any:
        return tl.scan(add, c, XS, length=7)

    with pytest.raises(ValueError, match=r"^scan: length is 7"):
        tl.explain(body, Z, XS)
    with pytest.raises(ValueError, match=r"^scan: length is 7"):
        carrying().map(lambda x: body(x, x), XS)


@pytest.mark.parametrize(
    ("init", "note"),
    [
        (
            np.zeros(3, dtype=np.float32),
            r"scan: init is ndarray array.* carried as it is; wrap it with torch.as_tensor",
        ),
        ((x for x in [Z]), "scan: init is an iterator, which is carried as it is; make a tuple of it"),
    ],
)
def test_an_init_of_another_kind_is_named_where_the_body_fails(init: Any, note: str) -> None:
    with pytest.raises(TypeError) as caught:
        tl.scan(lambda c, x: (torch.mul(x, c), x), init, XS)
    assert any(re.search(note, said) for said in caught.value.__notes__)


class OwnCell(nn.Module):
    """An LSTM cell as people write it: input first, state second."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        return self.cell(x, (h, c))


@pytest.mark.parametrize("compile", [False, True])
def test_a_cell_given_for_a_body_is_told_the_order_of_its_arguments(compile: bool) -> None:
    state = torch.zeros(2, 3), torch.zeros(2, 3)
    with pytest.raises(AttributeError, match="has no attribute 'dim'") as caught:
        tl_.scan(OwnCell(), state, torch.ones(5, 2, 3), compile=compile)
    note = (
        r"scan calls body_fn\(carry, x\), and this one takes \(x, state\), as a cell does: write def step\(state, x\)"
    )
    assert any(re.search(note, said) for said in caught.value.__notes__)


def test_a_warning_is_shown_where_the_caller_has_no_module_name() -> None:
    code = "tl.scan(lambda h, x: (h * x.sum().item(), h), Z, XS, compile=True)"
    with pytest.warns(tl.loop.NotCompiledWarning, match="reads a value"):
        exec(code, {"tl": tl, "Z": Z, "XS": XS})
