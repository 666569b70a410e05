"""Loops over a time dim that ranks share, in 4 real processes, on meshes of 2, 3 and 4 of them, beside one process."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop import reference
from tensorloop.distributed.ranks import Ranks
from tensorloop.loop import recurrences as recurrences_
from tests.support.processes import found_by, run_together

pytestmark = pytest.mark.usefixtures("on_the_cpu")  # its processes have no device

WORLD, SECONDS = 4, 150
D = torch.float64
CASES = 40  # random ones for each number of ranks
meshes: dict[int, DeviceMesh] = {}


def on_meshes(program: Callable[[int, int, DeviceMesh], Any]) -> Callable[[int], Any]:
    """A program of each mesh, for the ranks that are in it: {ranks: found}."""

    def run(rank: int) -> Any:
        for size in (2, 3, 4):
            if size not in meshes:
                meshes[size] = DeviceMesh("cpu", list(range(size)))
        return {size: program(rank, size, mesh) for size, mesh in meshes.items() if rank < size}

    run.__name__ = program.__name__
    run.__qualname__ = program.__qualname__
    return run


class Parts:
    """How ranks share T steps: so many each, in the order of time or in zigzag."""

    def __init__(self, lens: list[int], rank: int, mesh: DeviceMesh, zigzag: bool) -> None:
        self.lens, self.mesh, self.T, self.zigzag = lens, mesh, sum(lens), zigzag
        ends = [0, *itertools.accumulate(lens)]
        self.here = slice(ends[rank], ends[rank + 1])
        steps = list(range(self.T))
        if zigzag:
            halves = [(ends[r], ends[r] + lens[r] // 2, ends[r + 1]) for r in range(len(lens))]
            early = [steps[a:b] for a, b, _ in halves]
            late = [steps[b:c] for _, b, c in halves]
            steps = list(itertools.chain(*early, *late[::-1]))
        self.in_time = torch.tensor(steps, dtype=torch.int64)
        self.as_held = self.in_time.argsort()

    def part(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.here.start, self.here.stop - self.here.start)

    def sharded(self, x: Tensor, dim: int, needs: bool) -> tuple[Any, Any]:
        """The DTensor, and the leaf that holds this rank's part."""
        leaf = self.part(x.detach(), dim).clone().requires_grad_(needs)
        placed = DTensor.from_local(
            leaf, self.mesh, [Shard(dim)], run_check=False, shape=x.shape, stride=x.contiguous().stride()
        )
        return placed, leaf

    def whole(self, x: Tensor, needs: bool) -> Any:
        return distribute_tensor(x.detach().clone(), self.mesh, [Replicate()]).requires_grad_(needs)

    def by_time(self, x: Tensor, dim: int) -> Tensor:
        """A tensor whose `dim`, from the end, is time or 1, in the order of time."""
        return x.index_select(dim, self.in_time) if x.dim() >= -dim and x.shape[dim] == self.T else x


def close(one: Tensor, other: Tensor, case: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=lambda text: f"{case}: {text}")


# -- linear recurrences


def a_recurrence(seed: int, rank: int, size: int, mesh: DeviceMesh) -> None:
    """Values and gradients of a random one, against the loop in one process."""
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    reverse, matrix, zigzag = rng.random() < 0.5, rng.random() < 0.4, rng.random() < 0.3
    dtype = rng.choice([D, D, torch.complex128])
    parts = Parts([rng.choice([0, 1, 2, 3, 7]) * (1 + zigzag) for _ in range(size)], rank, mesh, zigzag)
    features = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1, 2]) + matrix)]
    dim = rng.randint(0, len(features) - matrix)
    shape = [*features[:dim], max(parts.T, 1), *features[dim:]]
    if not parts.T:
        return

    def draw(shape: list[int], scale: float = 1) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=made) * scale

    of_a = [n if rng.random() < 0.7 else 1 for n in shape]
    of_a = [*of_a[:-1], features[-1], features[-1]] if matrix else of_a
    a, b = draw(of_a, rng.choice([0, 0.6, 0.6])), draw(shape)
    init = draw(features) if rng.random() < 0.5 else None
    of_resets = [n if rng.random() < 0.7 else 1 for n in shape][: len(shape) - matrix]
    resets = torch.rand(of_resets, generator=made) < 0.3 if rng.random() < 0.4 else None
    needs = rng.random() < 0.8
    at_a, at_resets = dim - len(shape) - matrix, dim - len(shape) + matrix
    case = (seed, reverse, matrix, zigzag, parts.lens, shape, of_a, dim, resets is not None)

    leaves: list[Any] = [
        x if x is None else x.clone().requires_grad_(on) for x, on in ((a, needs), (b, True), (init, True))
    ]
    in_time = None if resets is None else parts.by_time(resets, at_resets)
    one, other = parts.by_time(leaves[0], at_a), parts.by_time(leaves[1], dim - len(shape))
    h = reference.linear_recurrence(one, other, leaves[2], dim, reverse, matrix, in_time)
    h = h.index_select(dim, parts.as_held)
    weights = draw(shape)
    h.backward(weights)

    def placed(x: Tensor, at: int, on: bool) -> tuple[Any, Any]:
        if x.dim() >= -at and x.shape[at] == parts.T > 1:
            return parts.sharded(x, at % x.dim(), on)
        return parts.whole(x, on), None

    (sharded_a, leaf_a), (sharded_b, leaf_b) = placed(a, at_a, needs), parts.sharded(b, dim, True)
    sharded_init: Any = None if init is None else parts.whole(init, True)
    sharded_resets = None if resets is None else placed(resets, at_resets, False)[0]
    found: Any = tl.linear_recurrence(
        sharded_a, sharded_b, sharded_init, dim=dim, reverse=reverse, matrix=matrix, resets=sharded_resets,
        layout="zigzag" if zigzag else "contiguous",
    )  # fmt: skip
    assert (found.placements, found.shape) == (sharded_b.placements, b.shape)
    close(found.to_local(), parts.part(h, dim), case)
    found.to_local().backward(parts.part(weights, dim))
    close(leaf_b.grad, parts.part(leaves[1].grad, dim), case)
    if needs and leaf_a is not None:
        close(leaf_a.grad, parts.part(leaves[0].grad, at_a % a.dim()), case)
    elif needs:
        assert sharded_a.grad.placements == (Partial(),)
        close(sharded_a.grad.full_tensor(), leaves[0].grad, case)
    if init is not None:
        close(sharded_init.grad.full_tensor(), leaves[2].grad, case)


@on_meshes
def recurrences(rank: int, size: int, mesh: DeviceMesh) -> int:
    for seed in range(CASES):
        a_recurrence(seed, rank, size, mesh)
    return CASES


@on_meshes
def packed_rows(rank: int, size: int, mesh: DeviceMesh) -> None:
    """Rows cut anywhere, empty ones too; by-row factors and init."""
    for seed in range(12):
        rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
        lens = [rng.choice([0, 1, 2, 6]) for _ in range(4)]
        parts = Parts([0] * size, rank, mesh, False)
        cuts = sorted(rng.randint(0, sum(lens)) for _ in range(size - 1))
        parts.__init__([b - a for a, b in itertools.pairwise([0, *cuts, sum(lens)])], rank, mesh, False)
        values = torch.randn(sum(lens), 3, dtype=D, generator=made)
        factors = torch.randn([(4, 1, 3), (3,), (sum(lens), 3)][seed % 3], dtype=D, generator=made)
        init = torch.randn(4, 3, dtype=D, generator=made) if seed % 2 else None
        given: list[Any] = [x if x is None else x.clone().requires_grad_() for x in (factors, values, init)]
        by_entry = seed % 3 == 2
        one = tl.PackedTensor(given[0], lens) if by_entry else given[0]
        h = tl.linear_recurrence(one, tl.PackedTensor(given[1], lens), given[2], reverse=seed % 4 > 1).values
        h.backward(values)
        sharded, leaf = parts.sharded(values, 0, True)
        of_a, leaf_a = parts.sharded(factors, 0, True) if by_entry else (parts.whole(factors, True), None)
        sharded_init: Any = None if init is None else parts.whole(init, True)
        found = tl.linear_recurrence(
            tl.PackedTensor(of_a, lens) if by_entry else of_a,
            tl.PackedTensor(sharded, lens),
            sharded_init,
            reverse=seed % 4 > 1,
        )
        local: Tensor = found.values.to_local()  # pyright: ignore
        close(local, parts.part(h, 0), seed)
        local.backward(parts.part(values, 0))
        close(leaf.grad, parts.part(given[1].grad, 0), seed)
        close(of_a.grad.full_tensor() if leaf_a is None else leaf_a.grad,
              given[0].grad if leaf_a is None else parts.part(given[0].grad, 0), seed)  # fmt: skip
        if init is not None:
            close(sharded_init.grad.full_tensor(), given[2].grad, seed)


@on_meshes
def odd_numbers(rank: int, size: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Products of factors that overflow where no state does; NaN in one row; no gradient asked for on some ranks."""

    def local(x: Tensor) -> Any:
        return DTensor.from_local(x, mesh, [Shard(0)])

    last = torch.zeros(40, 2, dtype=D)
    last[-1, 1] = float(rank == size - 1)
    large = tl.linear_recurrence(local(torch.full((40, 2), 1e30, dtype=D)), local(last)).full_tensor()
    turn = local(torch.tensor([[0.0, -1e30], [1e30, 0.0]], dtype=D).expand(40, 2, 2))
    turned = tl.linear_recurrence(turn, local(last), matrix=True).full_tensor()
    tiny = tl.linear_recurrence(local(torch.full((40, 2), 1e-30)), local(last.float())).full_tensor()
    rows = torch.ones(size * 2, dtype=D)
    rows[0] = torch.nan
    broken: Any = tl.linear_recurrence(
        0.5, tl.PackedTensor(distribute_tensor(rows, mesh, [Shard(0)]), [1, size * 2 - 1])
    ).values
    spoilt = broken.full_tensor()
    # Only the first rank asks for a gradient, and only the last one's part is in a loss.
    leaf = torch.ones(3, dtype=D, requires_grad=rank == 0)
    h: Any = tl.linear_recurrence(0.5, local(leaf))
    part = h.to_local()
    (part.sum() if rank == size - 1 else part[:0].sum()).backward()
    return {"large": large, "turned": turned, "tiny": tiny, "spoilt": spoilt, "grad": leaf.grad}


@on_meshes
def other_dims(rank: int, size: int, mesh: DeviceMesh) -> Any:
    """A batch or features that ranks share, and all of time on each."""
    x = torch.randn(5, size * 2, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    want = tl.linear_recurrence(0.5, x)
    found: Any = tl.linear_recurrence(0.5, distribute_tensor(x, mesh, [Shard(1)]))
    close(found.full_tensor(), want, "batch")
    # Its second derivative is an ordinary one.
    leaf = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    y: Any = tl.linear_recurrence(0.5, leaf)
    (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    second: Any = torch.autograd.grad(first.square().sum(), leaf)[0]
    return second.full_tensor().isfinite().all()


def two_dims(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("time", "features"))
    x = torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(0))
    a, init = x.sin(), x[0].cos()
    leaves: list[Any] = [y.clone().requires_grad_() for y in (a, x, init)]
    tl.linear_recurrence(*leaves).backward(x)
    placed: list[Any] = [
        distribute_tensor(y.detach(), mesh, kind).requires_grad_()
        for y, kind in ((a, [Replicate(), Replicate()]), (x, [Shard(0), Shard(1)]), (init, [Replicate(), Replicate()]))
    ]
    h: Any = tl.linear_recurrence(*placed)
    h.backward(distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
    for mine, leaf in zip(placed, leaves, strict=True):
        close(mine.grad.full_tensor(), leaf.grad, "two dims")


# -- associative scans, folds


@on_meshes
def scans(rank: int, size: int, mesh: DeviceMesh) -> None:
    for seed in range(20):
        rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
        zigzag, reverse, dim = rng.random() < 0.4, rng.random() < 0.5, rng.choice([0, 1])
        parts = Parts([rng.choice([0, 1, 2, 5]) * (1 + zigzag) for _ in range(size)], rank, mesh, zigzag)
        if not parts.T:
            continue

        def draw(*rest: int) -> Tensor:
            shape = [*rest]
            shape.insert(dim, parts.T)  # noqa: B023
            return torch.randn(shape, dtype=D, generator=made) * 0.7  # noqa: B023

        xs = draw(2, 3, 3), draw(2, 3)

        def fn(p: Any, q: Any) -> Any:
            return q[0] @ p[0], (q[0] @ p[1].unsqueeze(-1)).squeeze(-1) + q[1]

        given: list[Any] = [x.clone().requires_grad_() for x in xs]
        ys = tl.associative_scan(fn, tuple(x.index_select(dim, parts.in_time) for x in given), dim=dim, reverse=reverse)
        ys = [y.index_select(dim, parts.as_held) for y in ys]
        torch.autograd.backward(ys, [*xs])
        placed = [parts.sharded(x, dim, True) for x in xs]
        found = tl.associative_scan(
            fn, tuple(x for x, _ in placed), dim=dim, reverse=reverse, checkpoints=rng.choice([None, 2]),
            layout="zigzag" if zigzag else "contiguous",
        )  # fmt: skip
        local: list[Tensor] = [y.to_local() for y in found]
        torch.autograd.backward(local, [parts.part(x, dim) for x in xs])
        for y, z, (_, leaf), x in zip(local, ys, placed, given, strict=True):
            close(y, parts.part(z, dim), seed)
            close(leaf.grad, parts.part(x.grad, dim), seed)


@on_meshes
def folds(rank: int, size: int, mesh: DeviceMesh) -> Any:
    """A convolution over a shared time dim by the last steps before; baselines over hypotheses on several ranks."""
    x = torch.randn(size * 2, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    kernel = torch.randn(3, 1, 4, dtype=D, generator=torch.Generator().manual_seed(2))
    group = mesh.get_group()

    def convolved(steps: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(steps.T[None], kernel, groups=3)[0].T

    whole = x.clone().requires_grad_()
    want = convolved(torch.cat([x.new_zeros(3, 3), whole]))
    want.backward(want.detach())
    mine = x[rank * 2 : rank * 2 + 2].clone().requires_grad_()
    halo = tl.distributed.exclusive_fold(
        lambda before, last: torch.cat([before, last])[-3:], x.new_zeros(3, 3), mine, group=group
    )
    out = convolved(torch.cat([halo, mine]))
    close(out, want[rank * 2 : rank * 2 + 2], "halo")
    out.backward(out.detach())
    close(mine.grad, whole.grad[rank * 2 : rank * 2 + 2], "halo")  # pyright: ignore

    risks = torch.arange(6 * size, dtype=D).view(2, 3 * size) % 5
    scores = (risks * 0.3).sin()
    all_scores = scores.clone().requires_grad_()
    tl.minimum_risk(all_scores, risks).backward()
    here = scores[:, rank * 3 : rank * 3 + 3].clone().requires_grad_()
    gathered = tl.distributed.all_gather(here, dim=1, group=mesh)
    loss = tl.minimum_risk(gathered, tl.distributed.all_gather(risks[:, rank * 3 : rank * 3 + 3], dim=1, group=mesh))
    (loss / size).backward()  # DDP's mean over the ranks
    close(here.grad, all_scores.grad[:, rank * 3 : rank * 3 + 3], "risk")  # pyright: ignore
    uneven = tl.distributed.all_gather(torch.full((2, rank), rank), dim=1, group=mesh)
    back = tl.distributed.exclusive_fold(
        lambda n, x: n * 10 + x, torch.tensor(7), torch.tensor(rank), group=mesh, reverse=True
    )
    return uneven[0].tolist(), back.item()


# -- what is sent, kept and touched


class Touched(TorchDispatchMode):
    """Counts the numbers that operations write, and those that recurrences run over; views touch none."""

    count = 0

    def __enter__(self) -> Any:
        self._find, recurrences_.kernels.find = recurrences_.kernels.find, self._watched
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        recurrences_.kernels.find = self._find

    def _watched(self, name: str, *tensors: Tensor) -> Any:
        run = self._find(name, *tensors)

        def kernel(*args: Any) -> Tensor:
            with _disable_current_modes():
                out = run(*args)
            self.count += out.numel()
            return out

        return kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.count += sum(
            x.numel()
            for x in tree_leaves(out)
            if isinstance(x, Tensor)
            and not x.is_meta
            and (x.untyped_storage()._cdata not in held or func._schema.is_mutable)
        )
        return out


def counted(a: Any, b: Any, leaves: list[Tensor], weights: Tensor) -> tuple[int, int]:
    """Bytes kept and numbers touched by a recurrence and its gradient."""

    def run() -> Tensor:
        h: Any = tl.linear_recurrence(a, b)
        return h.to_local() if isinstance(h, DTensor) else h

    kept = tl.memory.saved_bytes(run)
    with Touched() as touched:
        h = run()
        torch.autograd.grad(h, leaves, weights)
    return kept, touched.count


@on_meshes
def costs(rank: int, size: int, mesh: DeviceMesh) -> Any:
    sent: list[int] = []
    plain = Ranks.gather

    def gather(ranks: Ranks, x: Tensor) -> Tensor:
        sent.append(x.numel() * x.element_size())
        return plain(ranks, x)

    found = {}
    for T in (240, 2400):
        whole = [torch.ones(T, 5, requires_grad=True) for _ in range(2)]
        one = counted(whole[0], whole[1], whole, torch.ones(T, 5))
        leaves = [torch.ones(T // size, 5, requires_grad=True) for _ in range(2)]
        parts: list[Any] = [DTensor.from_local(x, mesh, [Shard(0)]) for x in leaves]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "gather", gather)
            mine = counted(parts[0], parts[1], leaves, torch.ones(T // size, 5))
        found[T] = [*sent], mine[0] / one[0], mine[1] / one[1]
        sent.clear()
    return found


PROGRAMS = [recurrences, packed_rows, odd_numbers, other_dims, two_dims, scans, folds, costs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    run_together(folder, PROGRAMS, SECONDS, WORLD)
    return folder


SIZES = pytest.mark.parametrize("size", [2, 3, 4])


@SIZES
@pytest.mark.parametrize("program", [recurrences, packed_rows, other_dims, scans])
def test_shards_are_as_one_process(folder: Path, program: Any, size: int):
    found = found_by(folder, program, WORLD)
    assert all(size in of_rank for of_rank in found[:size])


def test_a_mesh_of_two_dims(folder: Path):
    assert found_by(folder, two_dims, WORLD) == [None] * WORLD


@SIZES
def test_products_do_not_overflow(folder: Path, size: int):
    for found in found_by(folder, odd_numbers, WORLD)[:size]:
        assert found[size]["large"][-1].tolist() == [0, 1]
        for name in ("large", "turned", "tiny"):
            assert found[size][name].isfinite().all()
        assert found[size]["turned"][-1].tolist() == [0, 1]


@SIZES
def test_nan_stays_in_its_row(folder: Path, size: int):
    for found in found_by(folder, odd_numbers, WORLD)[:size]:
        assert found[size]["spoilt"].isnan().tolist() == [True, *[False] * (size * 2 - 1)]


@SIZES
def test_ranks_take_part_that_ask_for_nothing(folder: Path, size: int):
    first, *others = [found[size]["grad"] for found in found_by(folder, odd_numbers, WORLD)[:size]]
    # Of the loss, the sum of the last three steps, to the first three.
    ahead = 3 * size - 1
    want = [sum(0.5**k for k in range(ahead - 2 - t, ahead - t + 1)) for t in range(3)]
    torch.testing.assert_close(first, torch.tensor(want, dtype=D))
    assert others == [None] * (size - 1)


@SIZES
def test_folds(folder: Path, size: int):
    for rank, found in enumerate(found_by(folder, folds, WORLD)[:size]):
        uneven, back = found[size]
        assert uneven == [r for r in range(size) for _ in range(r)]
        assert back == int("7" + "".join(str(r) for r in range(size - 1, rank, -1)))


@SIZES
def test_messages_do_not_grow_with_time(folder: Path, size: int):
    header, summary = 48, 5 * (4 + 8 + 4)  # of each feature a product, its exponent and h
    for found in found_by(folder, costs, WORLD)[:size]:
        for sent, _, _ in found[size].values():  # of two calls, and one backward
            assert sent == [header, summary] * 2 + [summary]


@SIZES
def test_a_rank_keeps_its_share(folder: Path, size: int):
    for found in found_by(folder, costs, WORLD)[:size]:
        assert found[size][2400][1] == pytest.approx(1 / size, abs=0.02)


def test_each_of_two_ranks_touches_half(folder: Path):
    for found in found_by(folder, costs, WORLD)[:2]:
        assert found[2][2400][2] <= 0.55
