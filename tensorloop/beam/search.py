"""Beam search that one can train through, of hypotheses of unknown length, with a certificate.

How it works, in the order to read it:

1. The search is a loop like `while_loop`'s, whose rows stop on their own. A step calls `step_fn`, lets the log decide
   (`decisions`, `choose`), and takes the carry of the hypotheses that run on, by row selection.
2. Ended hypotheses are in a pool apart from those that run (`decisions`). A row stops when no running hypothesis can
   reach the n-th of its pool, which a length model bounds (`length`).
3. Decisions have no gradient and stand in the log, outside of the loop's state. What has one is the carry, and a
   TensorArray of the log-probabilities of the tokens chosen and of the eos after each hypothesis. At the end the
   hypotheses are traced back through the log, and their scores are sums of what that array holds (`result`): so
   one backward pass reaches the model, as forced decoding of the same hypotheses would.
4. With `checkpoints` steps are done again in backward. A step that was decided is told what was decided; it searches
   for nothing and draws nothing, so ties and roundings cannot change it.
5. TensorArrays in the carry grow and are not reordered: they are read through the ancestry of each hypothesis
   (`arrays`, `ancestry`).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments, pytree, scope
from tensorloop._common.keywords import BEAM, names_instead
from tensorloop._common.progress import Progress
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.beam.ancestry import Ancestry, Family
from tensorloop.beam.arrays import unwrap_array, wrap_array
from tensorloop.beam.choose import Sample, StochasticBeam, TopK
from tensorloop.beam.decisions import Decisions, Gold, Rules
from tensorloop.beam.length import GNMT, BoundedReward, Power, Sum, check_bound, check_model, check_numbers, find_bound
from tensorloop.beam.result import Hypotheses, Lattice, build_result
from tensorloop.beam.scores import linear_log_softmax
from tensorloop.kernels.eager.beam import widened
from tensorloop.loop.api import run_loop
from tensorloop.loop.carry import Carry, describe, leading_rows
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.loop import Loop
from tensorloop.loop.shrunk_arrays import hidden, shown
from tensorloop.packed.tensor import PackedTensor
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray

__all__ = [
    "GNMT",
    "BoundedReward",
    "Hypotheses",
    "Lattice",
    "Power",
    "Sample",
    "StochasticBeam",
    "Sum",
    "TopK",
    "beam_search",
    "linear_log_softmax",
]

_NAME = "beam_search"
_STOPS = ("exact", "first_n", "hf", "never")
_EOS = ("always", "top_k", "top_2k")


@names_instead(**BEAM)
@called_eagerly
def beam_search(
    step_fn: Callable[..., tuple[Any, Tensor]],
    init_carry: Any,
    *,
    batch_size: int,
    beam_size: int,
    bos_id: int | Tensor | Sequence[int],
    eos_id: int | Tensor | Sequence[int],
    context: Any = None,
    max_steps: int | None = None,
    n_best: int | None = None,
    length: Any = None,
    choose: Any = None,
    stop: str = "exact",
    eos: str = "always",
    gold: PackedTensor | None = None,
    checkpoints: int | Schedule | Checkpoints | None = None,
    compact: bool | None = None,
    check: bool = False,
    progress: bool = False,
) -> Hypotheses:
    """The n best token sequences of each row under a step-by-step model, with the gradient of their scores.

        carry, log_probs = step_fn(carry, tokens)      # tokens (B, K) int64, bos_id first; log_probs (B, K, V)
        carry, log_probs = step_fn(carry, tokens, context)
        carry, log_probs = step_fn(carry, tokens, history=history)   # (B, K, t): each hypothesis' own tokens so far

    `bos_id`: one for all rows, or (B,) or a list of one each. `eos_id`: one or several; each ends a hypothesis, and
    `ends` says which did (that of gold is the first).
    Shapes: leaves of init_carry (B, *F) come to step_fn as (B, K, *F); 0-d tensors and numbers are shared. A
    TensorArray gets elements (B, K, *F) by its first append, grows, and shows each hypothesis its own past; one that
    has slots of (B, *F) already shows them to all hypotheses of the row. `context` stays (B, ...).
    `length`: a length model, `Sum()` by default; see `tl.beam`. `choose`: `TopK()`, `Sample(...)`, `StochasticBeam()`.
    `stop`: "exact" ends a row when nothing can come that belongs to its n best; "first_n" when n have ended; "hf" when
    the best running sum, scored at its length of now, is no better than the n-th; "never" at `max_steps`.
    `eos`: which hypotheses may end in a step: "always" all of them; "top_k" and "top_2k" those whose end is among the
    K or 2K best continuations. `max_steps` counts the eos; what has not ended then comes after what has.
    `gold` (B rows, without bos and eos) are hypotheses that are followed beside the others, in a place K of their own
    (step_fn then gets K + 1), and returned among the n best. `compact` drops rows that have stopped, by default where
    there is a context: a step_fn that closes over tensors with B rows cannot shrink. `check` refuses log_probs that do
    not sum to one; probabilities of more than 1 are warned of, and then no row is "exact". `progress` shows steps and
    rows that run.
    Ties: the hypothesis that ended first, then the smaller beam index, then the smaller token.
    Gradient: of `scores`, `final` and `token_scores`, as forced decoding of the same hypotheses has it, to init_carry,
    context, and all that step_fn closes over. Decisions are constants.
    Cost: a step selects K of K * V continuations, and reorders the carry at a cost that does not grow; it keeps what
    step_fn's operations save, and O(K) numbers a row. `checkpoints` as in `while_loop`; decisions are not made again.
    One sync a step on a device, or a few.
    Raises: ValueError (sizes, ids, NaN, all tokens forbidden, a length model without a bound), TypeError.
    Sources: Huang et al. 2017 (1809.00069) for the optimal stop; `docs/beam.md` for the others.

    Example:
        >>> words = torch.tensor([0.5, 0.3, 0.2]).log()  # of the end, 1 and 2
        >>> def step(carry, tokens):
        ...     return carry, words.expand(*tokens.shape, 3)
        >>> hyps = tl.beam_search(step, (), batch_size=1, beam_size=3, bos_id=0, eos_id=0)
        >>> [row.tolist() for row in hyps.tokens.unbind()], hyps.scores.exp()
        ([[], [1], [2]], tensor([[0.5000, 0.1500, 0.1000]]))
    """
    batch_size, beam_size = _int(batch_size, "batch_size", 0), _int(beam_size, "beam_size", 1)
    eos_ids = _ids(eos_id, "eos_id")
    max_steps = None if max_steps is None else _int(max_steps, "max_steps", 1)
    n_best = beam_size if n_best is None else _int(n_best, "n_best", 1)
    length, choose = Sum() if length is None else length, TopK() if choose is None else choose
    rules = Rules(beam_size, n_best, tuple(sorted(set(eos_ids))), max_steps, length, choose, stop, eos, check)
    search = _Search(step_fn, init_carry, context, batch_size, gold, rules, eos_ids[0])
    search.first_tokens = _first_tokens(bos_id, batch_size, search.device)
    _check_rules(rules, batch_size, search.device)
    search.decisions = Decisions(rules, batch_size, search.gold, search.device)
    search.ancestry = Ancestry(batch_size, search.size, search.device)
    compact = context is not None if compact is None else bool(compact)
    with Progress(progress, _NAME, max_steps) as search.bar:
        return search.run(checkpoints, compact)


class _Search:
    """One search: what its loop is given, and what becomes of the result."""

    decisions: Decisions
    ancestry: Ancestry
    bar: Progress
    first_tokens: Tensor  # (B, 1)

    def __init__(
        self,
        step_fn: Callable[..., Any],
        init_carry: Any,
        context: Any,
        rows: int,
        gold: PackedTensor | None,
        rules: Rules,
        gold_eos: int,
    ) -> None:
        if not callable(step_fn):
            raise TypeError(f"{_NAME}: step_fn must be callable, got {arguments.describe(step_fn)}")
        self.step_fn, self.context = step_fn, context
        self.rows, self.size = rows, rules.size + (gold is not None)
        self.eos_ids = rules.eos_ids
        self.tree = pytree.Tree(init_carry)
        leaves = self.tree.flatten(init_carry)
        assert leaves is not None
        paths, given = ([pair[i] for pair in pytree.leaves_with_paths(hidden(context))] for i in (0, 1))
        given = shown(given)
        leading_rows(given, paths, rows, _NAME, "context", "there are")
        self.device = _device_of([*leaves, *given])
        self.prefixes = {i: x for i, x in enumerate(leaves) if isinstance(x, TensorArray) and len(x)}
        self.leaves = [self._for_all(x, path) for x, path in zip(leaves, self.tree.paths, strict=True)]
        self.arrays = [i for i, x in enumerate(leaves) if isinstance(x, TensorArray)]
        self.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim()]
        self.births: dict[int, list[int]] = {i: [] for i in self.arrays}
        self.takes_history = _takes_history(step_fn)
        # Log-probabilities of what was chosen; where they may need a gradient, an array of the loop's has them.
        plain = not torch.is_grad_enabled() and transforms.maybe_level() is None and not transforms.forward_mode()
        self.values: list[Tensor] | None = [] if plain else None
        self.gold = None if gold is None else _gold(gold, rows, rules, gold_eos, self.device)
        self.vocabulary: int | None = None
        self.dtype: torch.dtype | None = None

    def _for_all(self, x: Any, path: str) -> Any:
        """A leaf of init_carry as the loop carries it: with K hypotheses, without the slots that they share."""
        shape: Any = x.shape if isinstance(x, Tensor) else ()
        if isinstance(x, TensorArray) and len(x):
            shape = x.element_shape or ()
        if len(shape) and shape[0] != self.rows:
            raise ValueError(f"{_NAME}: init_carry{path} is {describe(x)}; expected {self.rows} leading rows, or 0-d")
        if isinstance(x, Tensor):
            return x[:, None].expand(-1, self.size, *x.shape[1:]) if x.dim() else x
        if not isinstance(x, TensorArray) or not len(x):
            return x
        if not shape:
            raise ValueError(f"{_NAME}: elements of init_carry{path} are 0-d; expected ({self.rows}, ...)")
        return TensorArray()

    # -- the loop

    def run(self, checkpoints: Any, compact: bool) -> Hypotheses:
        tokens = self.first_tokens.repeat(1, self.size)
        ids = torch.arange(self.rows, device=self.device)
        state = (ids, tokens, TensorArray(), self.leaves)
        if self.rows:
            context = (self.context, list(self.prefixes.values()))
            search = Loop(_NAME, self._step, state, self.decisions.rules.max_steps, context)
            search.cond, search.compact = self._goes_on, compact
            # In its errors the user's context, not the pair that the loop has.
            assert search.context_tree is not None
            search.context_tree.paths = [path.removeprefix("[0]") for path in search.context_tree.paths]
            state, steps = run_loop(search, checkpoints, progress=False, known=False), search.steps()
        else:
            steps = ids
        self.ancestry.last = None
        return build_result(self.decisions, state[2] if self.values is None else self.values, steps)

    def _goes_on(self, state: Any, context: Any) -> Tensor:
        ids = state[0]
        running = self.decisions.running
        return running if len(ids) == self.rows else running[ids]

    def _step(self, t: int, state: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, None]:
        """A step, as a loop's body."""
        (ids, tokens, picked, leaves), (context, prefixes) = state, context[0]
        with self._aside():
            count = len(ids)
            rows = None if count == self.rows else ids.clone()
            if self.arrays or self.takes_history:
                self.ancestry.follow(t, self.decisions.parents, rows)
        given = self._given(t, rows, count, leaves, prefixes)
        options = {"history": self._history(t, rows, count)} if self.takes_history else {}
        user = () if self.context is None else (context,)
        try:
            out = self.step_fn(self.tree.unflatten(given), tokens, *user, **options)
            returned, log_probs = self._checked(out, given, t, count)
        except (RuntimeError, ValueError, IndexError) as error:
            if rows is not None:
                error.add_note(
                    f"{_NAME}: {count} of {self.rows} rows are left in the batch, as those that stop leave it. Where "
                    f"step_fn closes over a tensor with all {self.rows}, pass that in context=, or give compact=False"
                )
            raise
        with self._aside():
            tokens, parents, chosen = self.decisions.step(t, rows, log_probs)
            if t + 1 == self.decisions.steps and self.bar.bar is not None:
                self._show()
        # Not gather: it would keep log_probs for its backward.
        values = log_probs.reshape(-1).index_select(0, chosen).view(count, -1)
        if self.values is None:
            picked.append(values)
        else:
            self.values.append(values if rows is None else widened(values, rows, self.rows, 0.0))
        return (ids, tokens, picked, self._reordered(returned, parents)), None

    def _aside(self) -> AbstractContextManager[object]:
        """For what no recorder sees and no graph: nothing to do where there is neither."""
        return _NEITHER if self.values is not None and scope.here.notes is None else _unseen()

    def _given(
        self, t: int, ids: Tensor | None, rows: int, leaves: list[Any], prefixes: list[TensorArray]
    ) -> list[Any]:
        """The carry for step_fn: arrays read through the ancestry."""
        if not self.arrays:
            return leaves
        family = Family(self.ancestry, t, ids, rows, self.size)
        shared = dict(zip(self.prefixes, prefixes, strict=True))
        given = list(leaves)
        for i in self.arrays:
            given[i] = wrap_array(leaves[i], shared.get(i), self.births[i], family, self.tree.paths[i])
        return given

    def _history(self, t: int, ids: Tensor | None, rows: int) -> Tensor:
        """(B, K, t): the tokens of each hypothesis so far."""
        with scope.quietly(), torch.no_grad():
            places = self.ancestry.trace(t, ids).join(1) if t else None
            if places is None:
                return torch.empty(rows, self.size, 0, dtype=torch.int64, device=self.device)
            tokens = torch.stack(self.decisions.tokens[:t])
            tokens = tokens if ids is None else tokens.index_select(1, ids)
            return tokens.gather(2, places).permute(1, 2, 0).contiguous()

    def _reordered(self, leaves: list[Any], parents: Tensor) -> list[Any]:
        """The carry of the hypotheses that run on; `leaves` is used up."""
        for i in self.arrays:
            leaves[i] = unwrap_array(leaves[i], self.tree.paths[i])
        for i in self.tensors:
            x = leaves[i]
            leaves[i] = x.reshape(len(parents), *x.shape[2:]).index_select(0, parents).view(x.shape)
        return leaves

    # -- checks and progress

    def _checked(self, out: Any, given: list[Any], t: int, rows: int) -> tuple[list[Any], Tensor]:
        """The leaves of the carry that step_fn returned, and log_probs."""
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            got = f"a tuple of {len(out)}" if isinstance(out, tuple) else describe(out)
            raise TypeError(f"{_NAME}: step_fn must return (carry, log_probs), got {got}")
        leaves, log_probs = self.tree.flatten(out[0]), out[1]
        if leaves is None or not all(map(_alike, leaves, given)):
            leaves = Carry(self.tree.unflatten(given), _NAME).check(out[0], t)
        if not isinstance(log_probs, Tensor) or not log_probs.is_floating_point():
            raise TypeError(f"{_NAME}: log_probs must be a floating tensor (B, K, V), got {describe(log_probs)}")
        wanted = (rows, self.size, self.vocabulary or log_probs.shape[-1] if log_probs.dim() else 0)
        if tuple(log_probs.shape) != wanted:
            shown = str(wanted) if self.vocabulary else f"({rows}, {self.size}, V)"
            raise ValueError(f"{_NAME}: log_probs must be {shown} at step {t}, got {tuple(log_probs.shape)}")
        if transforms.is_batched(log_probs):
            raise RuntimeError(f"{_NAME}: vmap hides what decisions need to see; put its dim into the batch")
        if self.vocabulary is None:
            self._begin(log_probs)
        elif log_probs.dtype is not self.dtype:
            raise TypeError(f"{_NAME}: log_probs were {self.dtype} at step 0 and are {log_probs.dtype} at step {t}")
        return leaves, log_probs

    def _begin(self, log_probs: Tensor) -> None:
        """What is known once the first log_probs have come."""
        arguments.dense_tensor(log_probs, f"{_NAME}: log_probs")
        vocabulary = log_probs.shape[2]
        if self.eos_ids[-1] >= vocabulary:
            raise ValueError(f"{_NAME}: eos_id is {self.eos_ids[-1]}, but log_probs have {vocabulary} tokens")
        if self.gold is not None and self.gold.largest >= vocabulary:
            raise ValueError(f"{_NAME}: gold has the token {self.gold.largest}, but log_probs have {vocabulary} tokens")
        if log_probs.device != self.device:
            raise ValueError(
                f"{_NAME}: log_probs are on {log_probs.device}, but init_carry and context are on {self.device}"
            )
        self.vocabulary, self.dtype = vocabulary, log_probs.dtype

    def _show(self) -> None:
        self.bar.update()
        self.bar.bar.set_postfix(
            rows=int(self.decisions.running.sum()), hypotheses=int((self.decisions.keys > -torch.inf).sum())
        )


_NEITHER = nullcontext()


@contextmanager
def _unseen() -> Iterator[None]:
    with scope.quietly(), torch.no_grad():
        yield


def _alike(new: Any, old: Any) -> bool:
    """Whether a leaf of the carry is certainly what it must be."""
    if new is old:
        return True
    if isinstance(new, Tensor):
        return (
            isinstance(old, Tensor) and new.shape == old.shape and new.dtype is old.dtype and new.device == old.device
        )
    return type(new) is type(old) and not isinstance(new, TensorArray)


def _int(n: Any, what: str, least: int) -> int:
    if (n := arguments.as_int(n, _NAME, what)) < least:
        raise ValueError(f"{_NAME}: {what} must be at least {least}, got {n}")
    return n


def _ids(given: Any, what: str) -> list[int]:
    """One token, or several: a sequence of ints or a tensor (n,) of them."""
    if isinstance(given, Tensor) and given.dim() == 1 and given.dtype in arguments.INTEGERS:
        given = given.tolist()
    if not isinstance(given, (list, tuple, range)):
        return [_int(given, what, 0)]
    if not given:
        raise ValueError(f"{_NAME}: {what} has no token; give one or more")
    return [_int(x, f"{what}[{i}]", 0) for i, x in enumerate(given)]


def _first_tokens(bos_id: Any, rows: int, device: torch.device) -> Tensor:
    """(B, 1), from one token for all rows or one for each."""
    several = isinstance(bos_id, (list, tuple, range)) or (isinstance(bos_id, Tensor) and bos_id.dim() > 0)
    ids = _ids(bos_id, "bos_id") if rows or not several else []
    if several and len(ids) != rows:
        raise ValueError(
            f"{_NAME}: bos_id has {len(ids)} tokens, batch_size is {rows}; give one for each row, or an int"
        )
    return torch.tensor(ids, dtype=torch.int64, device=device)[:, None].expand(rows, 1)


def _check_rules(rules: Rules, rows: int, device: torch.device) -> None:
    check_model(rules.length, _NAME)
    for what, value, known in (("stop", rules.stop, _STOPS), ("eos", rules.eos, _EOS)):
        if value not in known:
            raise ValueError(f"{_NAME}: {what} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if not all(hasattr(rules.choose, name) for name in ("start", "choose", "by_key", "repeats")) or isinstance(
        rules.choose, type
    ):
        raise TypeError(f"{_NAME}: choose must be TopK(), Sample(...) or StochasticBeam(), got {rules.choose!r}")
    if rules.choose.by_key:
        if type(rules.length) is not Sum or rules.eos != "always" or rules.stop not in ("exact", "never"):
            raise ValueError(f"{_NAME}: {rules.choose!r} ranks by its keys: leave length, eos and stop as they are")
        if rules.n_best > rules.size:
            raise ValueError(f"{_NAME}: {rules.choose!r} draws {rules.size} sequences, not n_best={rules.n_best}")
    bound = find_bound(rules.length, rules.max_steps)
    check_numbers(rules.length, bound, rows, device, _NAME)
    if isinstance(rules.choose, Sample):
        return
    if rules.stop == "never" and rules.max_steps is None:
        raise ValueError(f"{_NAME}: stop='never' needs max_steps")
    if rules.stop == "exact":
        check_bound(rules.length, bound, rows, rules.max_steps, device, _NAME)


def _device_of(leaves: list[Any]) -> torch.device:
    for x in leaves:
        device = getattr(x, "device", None)
        if isinstance(device, torch.device):
            return device
    return torch.get_default_device()


def _takes_history(step_fn: Any) -> bool:
    try:
        parameter = inspect.signature(step_fn).parameters.get("history")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


def _gold(gold: Any, rows: int, rules: Rules, eos_id: int, device: torch.device) -> Gold:
    max_steps = rules.max_steps
    if not isinstance(gold, PackedTensor):
        raise TypeError(f"{_NAME}: gold must be a PackedTensor of tokens, got {arguments.describe(gold)}")
    if gold.dtype not in arguments.INTEGERS or gold.values.dim() != 1:
        raise TypeError(f"{_NAME}: gold must hold integers (N,), got {arguments.describe(gold.values)}")
    if len(gold.lens) != rows:
        raise ValueError(f"{_NAME}: gold has {len(gold.lens)} rows, batch_size is {rows}")
    if max_steps is not None and gold.max_len >= max_steps:
        row = int(gold.lens.argmax())
        raise ValueError(
            f"{_NAME}: gold row {row} has {gold.max_len} tokens and needs as many steps and one for its eos, "
            f"max_steps is {max_steps}"
        )
    ends = torch.isin(gold.values, torch.tensor(rules.eos_ids, device=gold.values.device))
    if bool(ends.any()):
        found = int(gold.values[ends][0])
        raise ValueError(f"{_NAME}: gold has the eos_id {found} among its tokens; leave bos and eos out")
    padded = torch.full((rows, gold.max_len + 1), eos_id, dtype=torch.int64, device=device)
    padded[:, : gold.max_len] = gold.pad(eos_id).to(device)
    return Gold(padded, gold.lens.to(device), int(padded.max()) if rows else 0, rules.eos_ids.index(eos_id))
