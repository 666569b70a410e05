"""The arguments of a search: what is refused, and what the others become."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.keywords import hints
from tensorloop._common.uploads import upload
from tensorloop.beam.choose import Sample
from tensorloop.beam.decisions import Rules
from tensorloop.beam.gold import Gold
from tensorloop.beam.length import Sum, check_bound, check_model, check_numbers, find_bound
from tensorloop.packed.tensor import PackedTensor

_NAME = "beam_search"
_STOPS = ("exact", "first_n", "hf", "never")
_EOS = ("always", "top_k", "top_2k")
_CAPPED = ("last", "ranked")
# What other libraries call it.
KEYWORDS = hints(
    ("num_beams beams beam_width width k", "beam_size= is the number of hypotheses that run"),
    (
        "max_length max_len max_new_tokens max_iters maxlen",
        "max_steps= bounds the tokens, the eos counted; it may be left out",
    ),
    ("min_length min_len", "mask the eos in step_fn by `history`: docs/beam.md has the recipe"),
    ("no_repeat_ngram_size prefix", "mask tokens in step_fn by `history`: docs/beam.md has the recipe"),
    ("num_return_sequences nbest num_hypotheses", "n_best= is the number of hypotheses returned"),
    (
        "length_penalty lenpen alpha",
        "length=tl.beam.Power(alpha) divides scores by a power of the length, length=tl.beam.GNMT(alpha) as GNMT does",
    ),
    ("early_stopping", "stop= is 'exact', 'first_n', 'hf' or 'never'"),
    ("recombine recombination merge_key merge_fn", "merge= gives a key, and hypotheses with equal keys become one"),
    ("bos_token_id bos sos_id start_token_id", "bos_id= is what every hypothesis begins with"),
    ("eos_token_id end_token_id", "eos_id= is what ends a hypothesis"),
    ("temperature top_k top_p do_sample", "choose=tl.beam.Sample(temperature, top_k, top_p) draws hypotheses"),
    ("init initial_state init_state", "init_carry= is what the search begins with"),
    ("body_fn step model", "step_fn= is the model"),
    ("dim axis", "the batch is dim 0, hypotheses are dim 1"),
)


def check_ids(given: Any, what: str) -> list[int]:
    """One token, or several: a sequence of ints or a tensor (n,) of them."""
    if isinstance(given, Tensor) and given.dim() == 1 and given.dtype in arguments.INTEGERS:
        given = given.tolist()
    if not isinstance(given, (list, tuple, range)):
        return [arguments.at_least(0, given, what)]
    if not given:
        raise WrongValue(f"{what} has no token; give one or more")
    return [arguments.at_least(0, x, f"{what}[{i}]") for i, x in enumerate(given)]


def read_bos(bos_id: Any, rows: int, device: torch.device) -> Tensor:
    """(B, 1), from one token for all rows or one for each."""
    several = isinstance(bos_id, (list, tuple, range)) or (isinstance(bos_id, Tensor) and bos_id.dim() > 0)
    ids = check_ids(bos_id, "bos_id") if rows or not several else []
    if several and len(ids) != rows:
        raise WrongValue(f"bos_id has {len(ids)} tokens, batch_size is {rows}; give one for each row, or an int")
    return upload(torch.tensor(ids, dtype=torch.int64, device="cpu"), device)[:, None].expand(rows, 1)


def check_rules(rules: Rules, rows: int, device: torch.device) -> None:
    """Refuses arguments that are none, or do not go together."""
    check_model(rules.length)
    named = (("stop", rules.stop, _STOPS), ("eos", rules.eos, _EOS), ("capped", rules.capped, _CAPPED))
    for what, value, known in named:
        if value not in known:
            raise WrongValue(f"{what} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if not all(hasattr(rules.choose, name) for name in ("start", "choose", "by_key", "repeats")) or isinstance(
        rules.choose, type
    ):
        raise WrongType(f"choose must be TopK(), Sample(...) or StochasticBeam(), got {rules.choose!r}")
    _check_merge(rules)
    if rules.choose.by_key:
        if type(rules.length) is not Sum or rules.eos != "always" or rules.stop not in ("exact", "never"):
            raise WrongValue(f"{rules.choose!r} ranks by its keys: leave length, eos and stop as they are")
        if rules.n_best > rules.size:
            raise WrongValue(f"{rules.choose!r} draws {rules.size} sequences, not n_best={rules.n_best}")
    bound = find_bound(rules.length, rules.max_steps)
    check_numbers(rules.length, bound, rows, device)
    if isinstance(rules.choose, Sample):
        return
    if rules.stop == "never" and rules.max_steps is None:
        raise WrongValue("stop='never' needs max_steps")
    if rules.stop == "exact":
        check_bound(rules.length, bound, rows, rules.max_steps, device)


def _check_merge(rules: Rules) -> None:
    if rules.merge is None:
        return
    if not callable(rules.merge):
        raise WrongType(f"merge must be a callable of the carry, got {arguments.describe(rules.merge)}")
    if rules.choose.by_key or rules.choose.repeats:
        raise WrongValue(
            f"merge= adds up the probabilities of hypotheses that differ, and {rules.choose!r} draws samples, which "
            f"may be the same; leave choose= or merge= out"
        )


def find_device(leaves: list[Any]) -> torch.device:
    """The device of the first leaf that has one."""
    for x in leaves:
        device = getattr(x, "device", None)
        if isinstance(device, torch.device):
            return device
    return torch.get_default_device()


def read_gold(gold: Any, rows: int, rules: Rules, eos_id: int, device: torch.device) -> Gold:
    """Gold hypotheses, one a row, which eos_id ends."""
    max_steps = rules.max_steps
    if rules.merge is not None:
        raise WrongValue(
            "gold= follows one alignment of a reference, and merge= adds up all of them; leave gold= out, and "
            "score references by a loss that adds up all of theirs, such as F.ctc_loss"
        )
    if not isinstance(gold, PackedTensor):
        raise WrongType(f"gold must be a PackedTensor of tokens, got {arguments.describe(gold)}")
    if gold.dtype not in arguments.INTEGERS or gold.values.dim() != 1:
        raise WrongType(f"gold must hold integers (N,), got {arguments.describe(gold.values)}")
    if len(gold.lens) != rows:
        raise WrongValue(f"gold has {len(gold.lens)} rows, batch_size is {rows}")
    if max_steps is not None and gold.max_len >= max_steps:
        row = int(gold.lens.argmax())
        raise WrongValue(
            f"gold row {row} has {gold.max_len} tokens and needs as many steps and one for its eos, "
            f"max_steps is {max_steps}"
        )
    ends = torch.isin(gold.values, torch.tensor(rules.eos_ids, device=gold.values.device))
    if bool(ends.any()):
        found = int(gold.values[ends][0])
        raise WrongValue(f"gold has the eos_id {found} among its tokens; leave bos and eos out")
    padded = torch.full((rows, gold.max_len + 1), eos_id, dtype=torch.int64, device=device)
    padded[:, : gold.max_len] = gold.pad(eos_id).to(device)
    return Gold(padded, gold.lens.to(device), rules.eos_ids.index(eos_id), rules.size)
