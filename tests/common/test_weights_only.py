"""What `torch.load` makes of files of ours by default, and what it refuses of files that somebody changed."""

import copy
import inspect
import io
import pickletools
import re
import zipfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

import tensorloop as tl
from tensorloop._common.saved import restore
from tests.house.test_public_names import ROOT, fresh

S, orders = tl.schedule, tl.ordering
VALUES = torch.arange(12.0).view(6, 2)


def packed() -> Any:
    return tl.PackedTensor(VALUES.clone(), tl.Dim("time", [2, 3, 1]))


def holes() -> Any:
    array = tl.TensorArray(capacity=5)
    array[1] = array[3] = VALUES
    return array


def hypotheses() -> tl.beam.Hypotheses:
    log_probs = torch.tensor([0.2, 0.3, 0.5]).log()
    sizes: Any = {"batch_size": 2, "beam_size": 2, "bos_id": 0, "eos_id": 1, "max_steps": 3}
    return tl.beam_search(lambda h, tokens: (h, log_probs.expand(*tokens.shape, 3)), torch.zeros(2, 2), **sizes)


def rollout() -> Any:
    hf = pytest.importorskip("tensorloop.hf")
    return hf.Rollout(packed(), packed(), torch.ones(3, dtype=torch.bool), packed())


def order() -> Any:
    return orders.hilbert(orders.Graph.from_grid((4, 4), window=3), block_size=4)


OBJECTS: dict[str, Callable[[], Any]] = {
    "PackedTensor": packed,
    "PackedTensor, of rows": lambda: packed()[1:],
    "PackedTensor, of no rows": lambda: tl.PackedTensor(torch.zeros(0, 2), []),
    "PackedTensor, channels first": lambda: packed().transpose(1, 2),
    "PackedTensor, time first": lambda: packed().transpose(0, 1),
    "PackedTensor, heads first": lambda: packed().unflatten(2, (2, 1)).transpose(1, 2),
    "PackedTensor, scores": lambda: packed() @ packed().transpose(1, 2),
    "PackedTensor, shape": lambda: packed().shape,
    "Dim": lambda: tl.Dim("time", [2, 0]),
    "packed.StaticPackedTensor": lambda: tl.packed.StaticPackedTensor(VALUES, torch.tensor([1, 3]), max_len=4),
    "packed.BatchSampler": lambda: tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, seed=3),
    "TensorArray": lambda: tl.TensorArray.unstack(VALUES),
    "TensorArray, of nothing": lambda: tl.TensorArray(element_shape=(None, 2), dtype=torch.float64, capacity=3),
    "TensorArray, with holes": holes,
    "Checkpoints": lambda: tl.Checkpoints(k=3, offload=Path.cwd(), residuals=2),
    "schedule.Binomial": lambda: S.Binomial(2),
    "schedule.Online": lambda: S.Online(2),
    "schedule.Periodic": lambda: S.Periodic(2),
    "schedule.StoreAll": lambda: S.StoreAll(),
    "schedule.Hierarchy": lambda: S.Hierarchy(2, S.Level("cpu", 3, write=0.5), S.Level(Path.cwd())),
    "schedule.Level": lambda: S.Level("cpu"),
    "schedule.Blocks": lambda: S.Blocks(S.Online(2), 3),
    "schedule.Budgeted": lambda: S.Budgeted(30, carry=1, residuals=8),
    "schedule.Forecast": lambda: S.forecast(S.Binomial(2), 9, carry=4),
    "schedule.Advance": lambda: S.Advance(1, 3, keep=True),
    "schedule.Snapshot": lambda: S.Snapshot(3, Path.cwd()),
    "schedule.Restore": lambda: S.Restore(3),
    "schedule.Drop": lambda: S.Drop(3),
    "schedule.Release": lambda: S.Release(3, 4),
    "schedule.Backward": lambda: S.Backward(3, 2),
    "RegroupPlan": lambda: tl.RegroupPlan([["a", "b"], ["c"]], [[1, 2], [1]], [["c", "a"]]),
    "ordering.Graph": lambda: orders.Graph.from_grid((3, 4), window=3),
    "ordering.Graph, of documents": lambda: orders.Graph.from_documents([2, 3]),
    "ordering.Graph, of two kinds": lambda: orders.Graph.of(torch.eye(2, 3)).at((torch.rand(2, 2), torch.rand(3, 2))),
    "ordering.Ordering": order,
    "ordering.Permutation": lambda: orders.Permutation([2, 0, 1]),
    "ordering.Report": lambda: order().report(),
    "beam.Hypotheses": hypotheses,
    "beam.Lattice": lambda: hypotheses().lattice,
    "beam.TopK": lambda: tl.beam.TopK(),
    "beam.Sample": lambda: tl.beam.Sample(0.5, top_k=3),
    "beam.StochasticBeam": lambda: tl.beam.StochasticBeam(),
    "beam.Sum": lambda: tl.beam.Sum(),
    "beam.Power": lambda: tl.beam.Power(0.5),
    "beam.GNMT": lambda: tl.beam.GNMT(0.6, floor=0.1),
    "beam.BoundedReward": lambda: tl.beam.BoundedReward(1.0, torch.ones(2)),
    "hf.Rollout": rollout,
}
# What was measured, to be read by people; `str()` of them is saved.
REPORTS = """loop.Explanation hf.AttentionReport memory.Saved memory.Growth memory.LineGrowth memory.Residuals
memory.Residual memory.Tracker memory.SiteBytes memory.Site memory.Timeline memory.Mark memory.LiveStorages
testing.LoopReport"""
# A module's `state_dict()` is saved. A cache has the model's config, of a class that the user allows.
OTHERS = {"loop.RNN", "loop.Carrying", "schedule.Schedule", "hf.TrainCache", "set_default_compile"}


def saved(x: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


def seen(x: Any) -> Any:
    """All that there is in an object, as values that can be compared."""
    if isinstance(x, Tensor):
        return x.dtype, x.tolist()
    if isinstance(x, list | tuple):
        return type(x).__name__, [seen(part) for part in x]
    if isinstance(x, tl.packed.BatchSampler):
        return list(x)
    if isinstance(x, tl.PackedTensor):
        return seen(x.values), seen(x.lens), x.dims[0].name
    if isinstance(x, tl.TensorArray):
        return repr(x), [None if hole else seen(x[i]) for i, hole in enumerate(x._holes.ljust(len(x), b"\0"))]
    if hasattr(x, "__dataclass_fields__"):
        return type(x).__name__, [(name, seen(getattr(x, name))) for name in x.__dataclass_fields__]
    return type(x).__name__, re.sub(r" at 0x\w+", "", repr(x))


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_what_is_saved_is_loaded(make: Callable[[], Any], weights_only: bool) -> None:
    x = make()
    again = torch.load(saved({"here": [x]}), weights_only=weights_only)["here"][0]
    assert type(again) is type(x)
    assert seen(again) == seen(x) == seen(copy.deepcopy(x))


def test_every_public_class_is_listed() -> None:
    named = re.findall(r"`tl\.([\w.]+)`", (ROOT / "docs/api/README.md").read_text())
    classes = {
        name
        for name in named
        if inspect.isclass(x := reduce(getattr, name.split("."), tl)) and not issubclass(x, Warning)
    }
    assert classes == {name.split(",")[0] for name in OBJECTS} | OTHERS | {*REPORTS.split()}


def test_a_file_names_one_function() -> None:
    everything = [make() for make in OBJECTS.values()]
    with zipfile.ZipFile(saved(everything)) as file:
        text = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    names = {at for code, at, _ in pickletools.genops(text) if code.name == "GLOBAL" and "torch" not in str(at)}
    assert names == {"tensorloop._common.saved restore", "collections OrderedDict"}


def test_a_process_that_has_loaded_nothing(tmp_path: Path) -> None:
    torch.save([packed(), S.Binomial(2), tl.TensorArray()], tmp_path / "x.pt")
    kinds = "[type(x).__name__ for x in torch.load(" + repr(str(tmp_path / "x.pt")) + ")]"
    assert fresh(f"import json, torch, tensorloop\nprint(json.dumps({kinds}))") == [
        *("PackedTensor", "Binomial", "TensorArray")
    ]


def test_a_report_is_no_state() -> None:
    with pytest.raises(Exception, match=r"GLOBAL tensorloop\.memory"):
        torch.load(saved(tl.memory.Mark("a", 1, 2)))


class Sent:
    """Saved as a call of `restore` with whatever it is given."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, self.state


DIM = Sent("Dim", None, torch.tensor([2, 3]))
ARRAY = (None, None, None), None
LONG = torch.tensor([1, 1])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (("Dim", None, torch.tensor([3, -1])), r"^Dim of a file: lens\[1\] is -1"),
        (("Dim", None, torch.tensor([3.0])), "Dim of a file: lens must be int64"),
        (("Dim", None, torch.tensor([[3]])), r"lens must be \(B,\)"),
        (("Dim", None, [3]), "Dim of a file"),
        (("Dim", 3, LONG), "name must be a string"),
        (("PackedTensor", torch.ones(4), DIM), r"^PackedTensor of a file: lens sum to 5, but there are 4 values"),
        (("PackedTensor", torch.ones(()), DIM), "PackedTensor of a file: values must be"),
        (("PackedTensor", [1.0], DIM), "PackedTensor of a file: values"),
        (("PackedTensor", torch.ones(2), LONG), "with a Dim"),
        (("PackedTensor", torch.ones(5), DIM, Tensor), "PackedTensor of a file"),
        (("Reordered", torch.ones(2, 3), 0, 1), "Reordered of a file: batch and time"),
        (("Reordered", packed(), 0, 0), "two dims of a packed tensor, got 0 and 0"),
        (("Reordered", packed(), 0, 7), "got 0 and 7"),
        (("PackedScores", torch.ones(5), packed(), DIM, DIM, ()), r"flat must be \(13,\)"),
        (("PackedScores", torch.ones(2), packed(), DIM, Sent("Dim", None, LONG), (-1,)), "PackedScores of a file"),
        (("PackedScores", torch.ones(2), packed(), DIM, Sent("Dim", None, LONG[:1]), ()), "PackedScores of a file"),
        (("StaticPackedTensor", torch.ones(4), torch.tensor([1, -5]), 4), "lens must be at least 0 each, got -5"),
        (("StaticPackedTensor", torch.ones(4), LONG, -1), "max_len is -1"),
        (("StaticPackedTensor", torch.ones(4), LONG.int(), 4), "lens must be int64"),
        (
            ("BatchSampler", torch.tensor([5]), 2, None, True, 0, False, (None, None), 0, torch.ones(1), []),
            "more than max_entries",
        ),
        (("TensorArray", *ARRAY, [5], torch.ones(2)), "slot 5 is a hole, but there are 2 slots"),
        (("TensorArray", *ARRAY, [1, 0], torch.ones(2)), "TensorArray of a file"),
        (("TensorArray", *ARRAY, [0], None), "there are 0 slots"),
        (("TensorArray", *ARRAY, [], torch.ones(())), "TensorArray of a file"),
        (("TensorArray", ((3,), None, None), None, [], torch.ones(2)), "TensorArray of a file"),
        (("TensorArray", (None, torch.int64, None), None, [], torch.ones(2)), "TensorArray of a file: .*int64"),
        (("TensorArray", (None, None, None), -1, [], torch.ones(2)), "capacity"),
        (("Permutation", torch.tensor([0, 0])), "Permutation of a file: permutation must have each number"),
        (("Graph", torch.tensor([0, 9]), torch.tensor([0]), (1, 1), (), (), (), None), "row pointers"),
        (
            ("Graph", torch.tensor([0, 1]), torch.tensor([7]), (1, 1), (), (), (), None),
            "Graph of a file: column numbers",
        ),
        (
            ("Graph", torch.tensor([0, 1]), torch.tensor([0]), (1, 1), (), (), (), torch.tensor([2])),
            "lens must sum to 1",
        ),
        (
            ("Ordering", order().graph, 4, (torch.zeros(16),), "hilbert"),
            "Ordering of a file: Permutation: permutation must be",
        ),
        (("Ordering", order().graph, 4, (torch.arange(9),), "hilbert"), "permutation has 9 positions"),
        (("RegroupPlan", (("a",),), ((-1,),), (("a",),)), "RegroupPlan of a file"),
        (("RegroupPlan", (("a",),), ((1,),), (("b",),)), "RegroupPlan of a file"),
        (("Checkpoints", 0, None, None, False, None), "k must be at least 1"),
        (("Binomial", 0), "k must be at least 1"),
        (("Hierarchy", 2, ["cpu"]), "must be a Level"),
        (("Binomial", 1, 2, 3), "Binomial of a file"),
        (("Sample", 0.0, None, None, None), "temperature"),
        (("system", "true"), "a file names 'system'"),
        (("_HOMES",), "a file names '_HOMES'"),
        ((["Dim"], 1), "unhashable|a file names"),
    ],
)
def test_what_was_changed_is_refused(state: tuple[Any, ...], message: str) -> None:
    file = saved(Sent(*state))
    with pytest.raises((ValueError, TypeError), match=message):
        torch.load(file)


def test_no_rows_below_zero_reach_attention() -> None:
    q = Sent("PackedTensor", torch.ones(2, 1, 4), Sent("Dim", None, torch.tensor([5, -3])))
    with pytest.raises(ValueError, match=r"lens\[1\] is -3"):
        tl.attention(*[torch.load(saved(q))] * 3)


def test_nothing_is_made_past_the_checks() -> None:
    """A class that torch knew could be made without its `__init__`, and filled with anything."""
    empty = "ctensorloop.packed.rows.dim\nDim\nN}\x86\x81."  # Dim.__new__(Dim, None, {})
    out = io.BytesIO()
    with zipfile.ZipFile(saved(0)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            text = b"\x80\x02" + empty.encode("latin1")
            after.writestr(name, text if name.endswith("data.pkl") else before.read(name))
    out.seek(0)
    with pytest.raises(Exception, match="not a type object"):
        torch.load(out)


class Mine(tl.PackedTensor):
    """A user's own."""


class Twice(S.Schedule):
    """A user's own."""

    def sweep(self, length: int | None) -> Any:
        return S.StoreAll().sweep(length)


def test_classes_of_a_user_are_those_that_they_allow() -> None:
    mine = saved([Mine(torch.ones(2), [2]), Twice()])
    with pytest.raises(Exception, match="Mine was not an allowed global"):
        torch.load(mine)
    mine.seek(0)
    with torch.serialization.safe_globals([Mine, Twice]):
        assert [type(x) for x in torch.load(mine)] == [Mine, Twice]


def test_a_generator_goes_on() -> None:
    g = torch.Generator().manual_seed(3)
    torch.rand(2, generator=g)
    again = torch.load(saved(tl.beam.Sample(generator=g))).generator
    assert torch.equal(torch.rand(2, generator=again), torch.rand(2, generator=g))


def test_a_folder_that_is_not_here(tmp_path: Path) -> None:
    (place := tmp_path / "gone").mkdir()
    file = saved([tl.Checkpoints(k=1, offload=place), S.Level(place)])
    place.rmdir()
    plan, level = torch.load(file)
    assert plan.offload == level.place == place


def test_a_sampler_asks_anew_which_process_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tl.packed.BatchSampler([1] * 8, 2, shuffle=False, rank=1, world_size=2)
    asks = tl.packed.BatchSampler([1] * 8, 2, shuffle=False)
    asks.set_epoch(4)
    for name, answer in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    given, asks = torch.load(saved([given, asks]))
    assert list(given) == [[1, 3], [5, 7]]
    assert list(asks) == [[3, 7]]


def test_shared_rows_are_shared_again() -> None:
    p = packed()
    a, b = torch.load(saved([p, p * 2]))
    assert a.dims[0] is b.dims[0]
    lens = torch.tensor([1, 2])
    c, d = torch.load(saved([tl.packed.StaticPackedTensor(VALUES, lens), tl.packed.StaticPackedTensor(-VALUES, lens)]))
    assert not (c + d).values.any()


def test_on_the_meta_device() -> None:
    again = torch.load(saved(packed()), map_location="meta")
    assert again.values.is_meta


@pytest.mark.filterwarnings("ignore")
def test_a_cache_whose_config_is_allowed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    cache: Any = tl.hf.TrainCache(config)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    with pytest.raises(Exception, match="LlamaConfig was not an allowed global"):
        torch.load(saved(cache))
    with torch.serialization.safe_globals([transformers.LlamaConfig]):
        again = torch.load(saved(cache))
    assert again.get_seq_length() == 3
    assert torch.equal(again.layers[0].keys, cache.layers[0].keys)
    layer = Sent("ArrayLayer", (tl.TensorArray(), tl.TensorArray.unstack(VALUES)), None, 0, None, False)
    with pytest.raises(ValueError, match="two TensorArrays of one length"):
        torch.load(saved(layer))


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints(tmp_path: Path) -> None:
    """What is no tensor is put in the place of what stands there, as dcp does with any object."""

    def state(n: int) -> dict[str, Any]:
        torch.manual_seed(n)
        return {
            "model": tl.loop.RNN(torch.nn.GRUCell(2, 3)).state_dict(),
            "array": tl.TensorArray.unstack(torch.full((n, 2), 1.0 * n)),
            "plan": tl.Checkpoints(k=n),
            "packed": tl.PackedTensor(torch.ones(n), [n]),
            "sampler": tl.packed.BatchSampler([1] * 8, 2),
        }

    old, new = state(3), state(5)
    next(iter(old["sampler"]))  # of which dcp keeps the state
    save_and_load: Any = dcp
    save_and_load.save(old, checkpoint_id=tmp_path)
    save_and_load.load(new, checkpoint_id=tmp_path)
    objects = "array", "plan", "packed"
    assert {name: seen(new[name]) for name in objects} == {name: seen(old[name]) for name in objects}
    assert list(new["sampler"]) == list(old["sampler"])[1:]
    assert all(torch.equal(new["model"][name], x) for name, x in old["model"].items())
