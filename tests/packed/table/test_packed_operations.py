"""The table of operations: a function's name stands in it alone, and each form has the function or says why not."""

import ast
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop.packed.by_size
from docs import packed_functions
from tensorloop.packed import FALLBACKS, PackedTensor, StaticPackedTensor
from tensorloop.packed.table import row as words
from tensorloop.packed.table.dispatch import HANDLED, is_taken
from tensorloop.packed.table.operations import TABLE, handlers_wanted, named
from tensorloop.packed.table.row import (
    ALONG,
    BY_ENTRY,
    CLASSES,
    LAST,
    LAYER,
    ROWS,
    SCORES,
    STATIC,
    UNTAKEN,
    VIEWS,
    WHOLE,
    Lacks,
)

HOME = Path(tensorloop.packed.__file__).parent
TABLES = {"operations.py", "untaken.py", "operators.py", "row.py"}
LENS = [3, 2, 4]  # of one entry there is no deviation
D = torch.float64


# -- one table


def strings(node: ast.AST) -> Iterator[str]:
    """Names in a tree, of which several may stand in one string; sentences are no names."""
    for found in ast.walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and " " not in found.value:
            yield found.value


def test_no_list_elsewhere_names_functions() -> None:
    """A list of three functions or more, at the top of a file, is a column of the table."""
    known = {name for name, row in TABLE.items() if row.kind not in (UNTAKEN, BY_ENTRY)}
    wrong = []
    for path in sorted(HOME.rglob("*.py")):
        if path.name in TABLES:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and len(found := known & {*strings(node)}) > 2:
                wrong.append(f"{path.relative_to(HOME)}:{node.lineno} has {sorted(found)}")
    assert not wrong, "\n".join(wrong)


def test_a_name_stands_in_few_files() -> None:
    """Beside the table a handler of several functions asks which one it is."""
    taken = {name for name, row in TABLE.items() if row.kind != UNTAKEN}
    files = dict.fromkeys(taken, 1)
    for path in HOME.rglob("*.py"):
        if path.name not in TABLES:
            for name in taken & {*strings(ast.parse(path.read_text()))}:
                files[name] += 1
    assert sum(files.values()) / len(files) <= 1.4


def test_every_handler_of_the_table_is_there_and_no_other() -> None:
    for handler, form, name in handlers_wanted():
        found = HANDLED[form][name]
        assert f"{found.__module__.rpartition('.')[2]}.{found.__name__.lstrip('_')}" == handler
    assert {(form, name) for form, known in HANDLED.items() for name in known} == {
        (form, name) for _, form, name in handlers_wanted()
    }


def test_the_page_is_current() -> None:
    assert packed_functions.PAGE.read_text() == packed_functions.text(), "python -m docs.packed_functions makes it anew"


def test_words_are_used() -> None:
    assert {word for row in TABLE.values() for word in row.says} == words.SAYS.keys()
    assert {row.kind for row in TABLE.values()} <= {
        value for name, value in vars(words).items() if name.isupper() and isinstance(value, str)
    }
    assert named("pads") - {"__matmul__"} == {*FALLBACKS}


def test_a_name_twice_is_an_error_and_an_unknown_word_too() -> None:
    with pytest.raises(AssertionError, match="softmax"):
        words.row(ALONG, "softmax")
    with pytest.raises(AssertionError, match="forgets"):
        words.row(ALONG, "a_new_function", says="forgets")
    assert "a_new_function" not in TABLE


# -- each form has a function, or says why not

P = PackedTensor(torch.randn(9, 2, 3, dtype=D), LENS)
FORMS: dict[str, Any] = {
    ROWS: P,
    VIEWS: P.transpose(1, 2),
    SCORES: P.transpose(1, 2) @ P.transpose(1, 2).mT,
    STATIC: StaticPackedTensor(P.values, torch.tensor(LENS), max_len=4),
}


def find(name: str) -> Callable[..., Any] | None:
    """The torch function of this name."""
    for part in (torch, F, Tensor, torch.linalg, torch.special):
        if callable(found := getattr(part, name, None)):
            return found
    return None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if row.kind not in (UNTAKEN, BY_ENTRY)))
def test_a_form_without_a_function_says_what_to_write(name: str, form: str) -> None:
    func = find(name)
    if is_taken(name, form) or func is None:
        return
    run = FORMS[form].__torch_function__
    with pytest.raises(TypeError, match=r"^[\w ]+: .+; .+") as caught:
        run(func, (), (FORMS[form],), {})
    assert name.strip("_").split("_with")[0][:4] in str(caught.value)


def test_views_lack_what_they_must_alone() -> None:
    """Of what rows take: those whose result would have an order of its own, and layers that have channels in dim 1."""
    lacking = {name for name in HANDLED[ROWS] if not is_taken(name, VIEWS)}
    assert lacking == {"masked_select", "msort", "stft", "_nested_tensor_from_mask_left_aligned"}
    reasons = [row for row in TABLE.values() if isinstance(row.runs.get(VIEWS), Lacks)]
    assert {row.name for row in reasons} == {"masked_select", "msort", "stft", "prelu"}


def test_every_kind_is_in_one_of_the_tests_below() -> None:
    along = {name for name, row in TABLE.items() if row.kind == ALONG}
    assert {*CALLS, *ALONG_BY_HAND} == along
    assert not {*CALLS} & {*ALONG_BY_HAND}
    whole = {name for name, row in TABLE.items() if row.kind == WHOLE and "losses.loss" in row.runs.values()}
    assert {*LOSSES} == whole
    assert {name for name, row in TABLE.items() if row.kind == LAST} == {*LASTS}
    assert {row.name for row in TABLE.values() if row.kind == CLASSES} == {"cross_entropy", "nll_loss"}
    assert all(row.runs.keys() <= {"channels", "images"} for row in TABLE.values() if row.kind == LAYER)


# -- along any dim, in any order: what each row has alone


def plain(name: str, *before: Any, **after: Any) -> Callable[[Any, int], Any]:
    """`name(x, *before, dim=d)`."""
    func: Any = find(name)
    return lambda x, d: func(x, *before, **({"dim": d} | after))


Call = Callable[[Any, int], Any]
CALLS: dict[str, Call] = {
    **{name: plain(name) for name in ("sum", "nansum", "mean", "nanmean", "amax", "amin", "max", "min", "argmax")},
    **{name: plain(name) for name in ("argmin", "logsumexp", "std", "var", "std_mean", "var_mean", "any", "all")},
    **{name: plain(name) for name in ("count_nonzero", "prod", "norm", "median", "nanmedian", "softmax")},
    **{name: plain(name) for name in ("log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin")},
    **{name: plain(name) for name in ("logcumsumexp", "normalize", "argsort", "diff")},
    "sort": lambda x, d: torch.sort(x, dim=d, stable=True),
    "linalg_norm": lambda x, d: torch.linalg.norm(x, dim=d),
    "linalg_vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "vector_norm": lambda x, d: torch.linalg.vector_norm(x, 3, dim=d),
    "special_softmax": lambda x, d: torch.special.softmax(x, d),
    "special_log_softmax": lambda x, d: torch.special.log_softmax(x, d),
    "kthvalue": plain("kthvalue", 1),
    "topk": lambda x, d: torch.topk(x, 1, d),
    "quantile": plain("quantile", 0.3),
    "nanquantile": plain("nanquantile", 0.3),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "cosine_similarity": lambda x, d: F.cosine_similarity(x, x.sin(), d),
    "unfold": lambda x, d: x.unfold(d, 1, 1),
    "repeat_interleave": lambda x, d: torch.repeat_interleave(x, 2, d),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0, 0])),
    "cat": lambda x, d: torch.cat([x, x.cos()], d),
    "concat": lambda x, d: torch.concat([x, x.cos()], d),
    "concatenate": lambda x, d: torch.concatenate([x, x.cos()], d),
    "gather": lambda x, d: torch.gather(x, d, x.argsort(d)),
    "take_along_dim": lambda x, d: torch.take_along_dim(x, x.argsort(d), d),
    "select": lambda x, d: x.select(d, 0),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
}
# Along a feature dim alone, of several results, or drawing numbers.
ALONG_BY_HAND: dict[str, Call] = {
    "glu": lambda x, d: F.glu(x, d),
    "chunk": lambda x, d: x.chunk(2, d),
    "split": lambda x, d: x.split(1, d),
    "split_with_sizes": lambda x, d: torch.split_with_sizes(x, [1, x.shape[d] - 1], d),
    "tensor_split": lambda x, d: x.tensor_split(2, d),
    "unbind": lambda x, d: x.unbind(d),
    "gumbel_softmax": lambda x, d: F.gumbel_softmax(x, dim=d) * 0,
    "linalg_matrix_norm": lambda x, d: torch.linalg.matrix_norm(x, "fro", (-2, -1)),
}


def leaves(x: Any) -> list[Any]:
    return [y for part in x for y in leaves(part)] if isinstance(x, (tuple, list)) else [x]


def assert_as_alone(name: str, call: Call, p: PackedTensor, order: tuple[int, ...], d: int) -> None:
    """Each row of `call(p in this order, d)` is what that row alone gives, and so are gradients and the dims it has."""
    batch = order.index(0)
    alone = [row.detach().requires_grad_() for row in p]
    p.values.requires_grad_()
    wanted = [leaves(call(row.permute([n - 1 for n in order if n]), d - (d > batch))) for row in alone]
    found = leaves(call(p.permute(order), d))
    for k, part in enumerate(found):
        assert "keeps" not in TABLE[name].says or part.ndim == p.ndim
        assert "drops" not in TABLE[name].says or part.ndim == p.ndim - 1
        place = batch - (part.ndim < p.ndim and d < batch)  # of the batch, where d is gone
        for one, other in zip(part.unbind(place), wanted, strict=True):
            torch.testing.assert_close(one, other[k])
    if any(part.requires_grad for part in found):
        torch.testing.assert_close(
            slopes(found, [p.values])[0], torch.cat(slopes([x for of in wanted for x in of], alone))
        )


def slopes(results: list[Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of the sum of the squares of what is differentiable."""
    total: Any = sum(x.square().sum() for x in results if x.requires_grad)
    return torch.autograd.grad(total, inputs)


@pytest.mark.filterwarnings("ignore::tensorloop.packed.PackedFallbackWarning")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 2, 3, 1), (2, 1, 3, 0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_along_each_dim_of_each_order(name: str, order: tuple[int, ...]) -> None:
    p = PackedTensor(torch.randn(9, 2, 3, dtype=D), LENS)
    batch = order.index(0)
    for d in {*range(4)} - {batch}:
        assert_as_alone(name, CALLS[name], p, order, d)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ALONG_BY_HAND)
def test_along_features_of_each_order(name: str, order: tuple[int, ...]) -> None:
    p, d = PackedTensor(torch.randn(9, 2, 4, dtype=D), LENS), order.index(2)
    if name == "linalg_matrix_norm" and not {*order[-2:]} <= {2, 3}:
        with pytest.raises(TypeError, match="norm of matrices over dims"):
            ALONG_BY_HAND[name](p.permute(order), d)
    else:
        assert_as_alone(name, ALONG_BY_HAND[name], p, order, d)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 2, 3, 1)], ids=str)
def test_dims_one_by_one(order: tuple[int, ...]) -> None:
    x = PackedTensor(torch.randn(9, 2, 3, dtype=D), LENS).permute(order)
    batch = order.index(0)
    for dims in itertools.permutations({*range(4)} - {batch}, 2):
        for one, row in zip(x.flip(*dims).unbind(batch), x.unbind(batch), strict=True):
            assert one.equal(row.flip([d - (d > batch) for d in dims]))


_PAIRS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div")
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    name: lambda x, y, name=name: getattr(F, name)(x.sigmoid(), y.sigmoid(), reduction="none")
    for name in (*_PAIRS, "binary_cross_entropy", "poisson_nll_loss", "soft_margin_loss")
}
LASTS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: F.linear(x, torch.arange(6.0, dtype=D).view(2, 3)),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.arange(8.0, dtype=D).view(2, 4)),
    "cdist": lambda x: torch.cdist(x, torch.arange(6.0, dtype=D).view(2, 3)),
}


@pytest.mark.parametrize(
    "turn", [lambda p: p.transpose(1, 2), lambda p: p.transpose(0, 1)], ids=["heads", "time first"]
)
@pytest.mark.parametrize("name", [*LOSSES, *LASTS])
def test_losses_and_layers_of_views(name: str, turn: Callable[[Any], Any]) -> None:
    p, q = (PackedTensor(torch.randn(9, 2, 3, dtype=D), LENS) for _ in range(2))
    if name == "cdist":
        p, turn = p[:, :, 0], lambda p: p.transpose(0, 1)  # of (B, T*, D) alone
    if name in LOSSES:
        whole, seen = LOSSES[name](p, q), LOSSES[name](turn(p), turn(q))
        assert torch.equal(whole.sum(), LOSSES[name](p.values, q.values).sum())
    else:
        whole, seen = LASTS[name](p), LASTS[name](turn(p))
        for one, row in zip(whole, p, strict=True):
            torch.testing.assert_close(one, LASTS[name](row))
    assert turn(seen).equal(whole)


# -- static tensors along features

STATIC_ALONG = sorted(name for name in {*CALLS, *ALONG_BY_HAND} - {"index_select"} if is_taken(name, STATIC))


def test_a_static_tensor_given_by_name() -> None:
    p, s = PackedTensor(P.values, LENS), FORMS[STATIC]
    calls: list[Callable[[Any], Any]] = [
        lambda x: torch.std(input=x, dim=2),
        lambda x: torch.topk(input=x, k=1, dim=-1)[0],
    ]
    for call in calls:
        assert torch.equal(call(s).trim().values, call(p).values)
    with pytest.raises(TypeError, match="std: it is not there; write it with"):
        torch.std(input=s, dim=1)


def test_an_index_along_features_of_a_static_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"index_select: of another tensor along its features; use p\.pack"):
        CALLS["index_select"](FORMS[STATIC], 2)


@pytest.mark.parametrize("d", [2, 3, -1])
@pytest.mark.parametrize("name", STATIC_ALONG)
def test_static_tensors_along_features(name: str, d: int) -> None:
    call, values = (CALLS | ALONG_BY_HAND)[name], torch.randn(9, 2, 4, dtype=D)
    free = torch.cat([values, values.new_full((3, 2, 4), torch.nan)]).requires_grad_()
    p = PackedTensor(values.requires_grad_(), LENS)
    found = leaves(call(StaticPackedTensor(free, torch.tensor(LENS), max_len=4), d))
    wanted = leaves(call(p, d))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.trim().values, other.values)
    if wanted[0].requires_grad:
        found[0].square().sum().backward()
        wanted[0].values.square().sum().backward()
        torch.testing.assert_close(free.grad, torch.cat([values.grad, torch.zeros(3, 2, 4)]))  # pyright: ignore


# -- scores

OF_SCORES = sorted(name for name in CALLS if TABLE[name].runs.get(SCORES) == "score_ops.along")


@pytest.mark.filterwarnings("ignore::tensorloop.packed.PackedFallbackWarning")
@pytest.mark.parametrize("d", [1, 2, 3], ids=["heads", "queries", "keys"])
@pytest.mark.parametrize("name", OF_SCORES)
def test_scores_along_heads_queries_and_keys(name: str, d: int) -> None:
    q, k = (PackedTensor(torch.randn(9, 2, 3, dtype=D), LENS).transpose(1, 2) for _ in range(2))
    scores = q @ k.mT
    wanted = [leaves(CALLS[name](row, d - 1)) for row in scores.unbind()]
    for part, rows in zip(leaves(CALLS[name](scores, d)), zip(*wanted, strict=True), strict=True):
        for one, other in zip(part.unbind(0), rows, strict=True):
            torch.testing.assert_close(one, other)
