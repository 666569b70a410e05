"""Beam search that one can train through, of hypotheses of unknown length, with a certificate.

How it works, in the order to read it:

1. The search is a loop like `while_loop`'s, whose rows stop on their own. A step calls `step_fn`, decides which
   hypotheses run on (`decisions`, `choose`), and takes their carry, by row selection (`carry`). With `merge`, what has
   equal keys is one before that is decided; at the end its scores are summed again, now with their gradient.
2. Ended hypotheses are in a pool apart from those that run (`pool`). A row stops when no running hypothesis can
   reach the n-th of its pool, which a length model bounds (`length`).
3. Decisions have no gradient and stand outside of the loop's state. What has one is the carry, and a
   TensorArray of the log-probabilities of the tokens chosen and of the eos after each hypothesis. At the end the
   hypotheses are traced back through the decisions, and their scores are sums of what that array holds (`result`): so
   one backward pass reaches the model, as forced decoding of the same hypotheses would.
4. With `checkpoints` steps are done again in backward. A step that was decided is told what was decided; it searches
   for nothing and draws nothing, so ties and roundings cannot change it.
5. TensorArrays in the carry grow and are not reordered: they are read through the ancestry of each hypothesis
   (`arrays`, `ancestry`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._common.errors import named
from tensorloop._common.progress import Progress
from tensorloop._torch import transforms
from tensorloop.beam.ancestry import Ancestry, Family
from tensorloop.beam.batch import Batch
from tensorloop.beam.carry import HypothesesCarry
from tensorloop.beam.decisions import Decisions
from tensorloop.beam.model import Model
from tensorloop.beam.result import Hypotheses, build_result
from tensorloop.loop.internals import run_rows
from tensorloop.tensor_array.array import TensorArray

_NAME = "beam_search"


class State(NamedTuple):
    """The carry of the loop of a search, of the rows in the batch."""

    ids: Tensor  # (b,)
    tokens: Tensor  # (b, K) int64, the last ones
    picked: TensorArray  # log_probs of what was chosen, where they may need a gradient
    leaves: list[Any]  # of the carry of step_fn


class Search:
    """One search: the body of its loop, and what stands beside that."""

    def __init__(self, model: Model, carry: HypothesesCarry, decisions: Decisions, bar: Progress) -> None:
        self.model, self.carry, self.decisions, self.bar = model, carry, decisions, bar
        self.rows, self.size = carry.rows, carry.size
        self.ancestry = Ancestry(carry.rows, carry.size, decisions.device)
        self.left: dict[int, Tensor] = {}  # by how many rows are left in the batch: which, on the CPU
        # Log-probabilities of what was chosen; where they may need a gradient, an array of the loop's has them.
        plain = not torch.is_grad_enabled() and transforms.maybe_level() is None and not transforms.forward_mode()
        self.values: list[Tensor] | None = [] if plain else None

    def run(self, first_tokens: Tensor, context: Any, compact: bool, checkpoints: Any) -> Hypotheses:
        """The result of all steps. `first_tokens` (B, 1)."""
        ids = torch.arange(self.rows, device=self.decisions.device)
        state, steps = State(ids, first_tokens.repeat(1, self.size), TensorArray(), self.carry.init), ids
        if self.rows:
            state, steps = run_rows(
                _NAME, self._goes_on, self._step, state, length=self.decisions.rules.max_steps, context=context,
                own_context=list(self.carry.prefixes.values()), compact=compact, checkpoints=checkpoints,
            )  # fmt: skip
        self.ancestry.forget()
        return build_result(self.decisions, state.picked if self.values is None else self.values, steps)

    def _goes_on(self, state: State, context: Any) -> Tensor:
        """(b,) bool"""
        running, left = self.decisions.asked, len(state.ids)
        if left == self.rows:
            return running
        if running.device == state.ids.device:
            return running[state.ids]
        if left not in self.left:
            self.left[left] = state.ids.cpu()
        return running[self.left[left]]

    @named(_NAME)
    def _step(self, t: int, state: State, row: list[Any], context: tuple[Any, ...]) -> tuple[State, None]:
        """A step, as a loop's body: the model, the decisions, and the carry of what runs on."""
        user_context, prefixes = context[0]
        with self._aside():
            batch = Batch(None if len(state.ids) == self.rows else state.ids.clone(), self.rows)
            if self.carry.births or self.model.takes_history:
                self.ancestry.follow(t, self.decisions.parents, batch)
        user_context = () if user_context is None else (user_context,)
        leaves, log_probs, merge_keys = self._ask(t, state, batch, user_context, prefixes)
        with self._aside():
            tokens, parents, chosen = self.decisions.step(t, batch, log_probs, merge_keys)
            if t + 1 == self.decisions.steps and self.bar.bar is not None:
                self._show()
        # Not gather: it would keep log_probs for its backward.
        values = log_probs.reshape(-1).index_select(0, chosen).view(batch.left, -1)
        if self.values is None:
            state.picked.append(values)
        else:
            self.values.append(batch.widen(values, 0.0))
        return State(state.ids, tokens, state.picked, self.carry.reorder(leaves, parents)), None

    def _ask(
        self, t: int, state: State, batch: Batch, context: tuple[Any, ...], prefixes: list[TensorArray]
    ) -> tuple[list[Any], Tensor, Tensor | None]:
        """The leaves of the carry, and log_probs, that the model gives; and the keys by which hypotheses merge."""
        given = self.carry.give(state.leaves, prefixes, Family(self.ancestry, t, batch, batch.left, self.size))
        history = self._read_history(t, batch) if self.model.takes_history else None
        try:
            carry, log_probs = self.model.call(self.carry.tree.unflatten(given), state.tokens, context, history)
            leaves, log_probs = self.carry.check(carry, given, t), self.model.check(log_probs, t, batch.left)
            merge = self.decisions.rules.merge
            if merge is None or t < self.decisions.steps:  # what was decided is not decided again
                return leaves, log_probs, None
            with _unseen():
                return leaves, log_probs, self.model.read_keys(merge, carry, t, batch.left)
        except (RuntimeError, ValueError, IndexError) as error:
            if batch.ids is not None:
                error.add_note(
                    f"{_NAME}: {batch.left} of {self.rows} rows are left in the batch, as those that stop leave it. "
                    f"Where step_fn closes over a tensor with all {self.rows}, pass that in context=, or give "
                    f"compact=False"
                )
            raise

    def _read_history(self, t: int, batch: Batch) -> Tensor:
        """(b, K, t): the tokens of each hypothesis so far."""
        with scope.library_code(), torch.no_grad():
            if not t:
                return torch.empty(batch.left, self.size, 0, dtype=torch.int64, device=self.decisions.device)
            places = self.ancestry.trace(t, batch).join(1)
            tokens = batch.select(torch.stack(self.decisions.tokens[:t]), 1)
            return tokens.gather(2, places).permute(1, 2, 0).contiguous()

    def _aside(self) -> AbstractContextManager[object]:
        """For what no recorder sees and no graph: nothing to do where there is neither."""
        return _NEITHER if self.values is not None and scope.here.recorder is None else _unseen()

    def _show(self) -> None:
        running, hypotheses = self.decisions.running, self.decisions.keys > -torch.inf
        self.bar.update()
        self.bar.bar.set_postfix(rows=int(running.sum()), hypotheses=int(hypotheses.sum()))


_NEITHER = nullcontext()


@contextmanager
def _unseen() -> Iterator[None]:
    with scope.library_code(), torch.no_grad():
        yield
