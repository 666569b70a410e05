"""The function `beam_search`: its arguments, and what becomes of them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor

from tensorloop._common import arguments, pytree
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.progress import Progress
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.beam.arguments import KEYWORDS, check_ids, check_int, check_rules, find_device, read_bos, read_gold
from tensorloop.beam.carry import HypothesesCarry
from tensorloop.beam.choose import TopK
from tensorloop.beam.decisions import Decisions, Rules
from tensorloop.beam.length import Sum
from tensorloop.beam.model import Model
from tensorloop.beam.result import Hypotheses
from tensorloop.beam.search import Search
from tensorloop.loop import Checkpoints
from tensorloop.loop.for_rooms import check_context
from tensorloop.packed.tensor import PackedTensor
from tensorloop.schedule import Schedule

_NAME = "beam_search"
C = TypeVar("C")
# The last form is for a step_fn that takes `history`; checkers try it last, and lambdas get the types of the others.
Step = (
    Callable[[C, Tensor], tuple[C, Tensor]]
    | Callable[[C, Tensor, Any], tuple[C, Tensor]]
    | Callable[..., tuple[C, Tensor]]
)


@named(_NAME, KEYWORDS)
@called_eagerly
def beam_search(
    step_fn: Step[C],
    init_carry: C,
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
    stop: Literal["exact", "first_n", "hf", "never"] = "exact",
    eos: Literal["always", "top_k", "top_2k"] = "always",
    capped: Literal["last", "ranked"] = "last",
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
    K or 2K best continuations. `max_steps` counts the eos; `capped` says where hypotheses come that have not ended
    then: "last", after all that have, or "ranked", by their scores, as if they had.
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
    batch_size, beam_size = check_int(batch_size, "batch_size", 0), check_int(beam_size, "beam_size", 1)
    eos_ids = check_ids(eos_id, "eos_id")
    max_steps = None if max_steps is None else check_int(max_steps, "max_steps", 1)
    n_best = beam_size if n_best is None else check_int(n_best, "n_best", 1)
    length, choose = Sum() if length is None else length, TopK() if choose is None else choose
    rules = Rules(beam_size, n_best, tuple(sorted(set(eos_ids))), max_steps, length, choose, stop, eos, check, capped)
    if not callable(step_fn):
        raise WrongType(f"step_fn must be callable, got {arguments.describe(step_fn)}")
    size = beam_size + (gold is not None)
    device = find_device([*pytree.leaves(init_carry), *check_context(context, batch_size)])
    if device.type == "meta":
        raise WrongValue("init_carry is on the meta device, where a search has no numbers to decide by; move it")
    carry = HypothesesCarry(init_carry, batch_size, size)
    followed = None if gold is None else read_gold(gold, batch_size, rules, eos_ids[0], device)
    first_tokens = read_bos(bos_id, batch_size, device)
    check_rules(rules, batch_size, device)
    model = Model(step_fn, rules, followed, size, device)
    decisions = Decisions(rules, batch_size, followed, device)
    compact = context is not None if compact is None else arguments.as_bool(compact, "compact")
    with Progress(progress, _NAME, max_steps) as bar:
        return Search(model, carry, decisions, bar).run(first_tokens, context, compact, checkpoints)
