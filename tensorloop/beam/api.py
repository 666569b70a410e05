"""The function `beam_search`: its arguments, and what becomes of them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor

from tensorloop._common import arguments, pytree
from tensorloop._common.arguments import at_least
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.progress import Progress
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.beam.arguments import KEYWORDS, check_ids, check_rules, find_device, read_bos, read_gold
from tensorloop.beam.carry import HypothesesCarry
from tensorloop.beam.choose import TopK
from tensorloop.beam.decisions import Decisions, Rules
from tensorloop.beam.length import Sum
from tensorloop.beam.model import Model
from tensorloop.beam.result import Hypotheses
from tensorloop.beam.search import Search
from tensorloop.loop import Checkpoints
from tensorloop.loop.internals import check_context
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
    merge: Callable[[C], Tensor] | None = None,
    stop: Literal["exact", "first_n", "hf", "never"] = "exact",
    eos: Literal["always", "top_k", "top_2k"] = "always",
    capped: Literal["last", "ranked"] = "last",
    gold: PackedTensor | None = None,
    checkpoints: int | Schedule | Checkpoints | None = None,
    compact: bool | None = None,
    check: bool = False,
    progress: bool = False,
) -> Hypotheses:
    """Finds the n best token sequences of each row under a step-by-step model, with the gradient of their scores.

        hyps = tl.beam_search(step_fn, init_carry, batch_size=B, beam_size=K, bos_id=0, eos_id=1)
        hyps = tl.beam_search(step_fn, init_carry, ..., context=encoder_states, max_steps=100, n_best=4)
        hyps = tl.beam_search(step_fn, init_carry, ..., choose=tl.beam.Sample())  # samples, not the best

    The model is one of these:

        carry, log_probs = step_fn(carry, tokens)      # tokens (B, K) int64, bos_id first; log_probs (B, K, V)
        carry, log_probs = step_fn(carry, tokens, context)
        carry, log_probs = step_fn(carry, tokens, history=history)   # (B, K, t): each hypothesis' own tokens so far

    Args:
        step_fn: the model, as above. It gives log-probabilities, as log_softmax does, and not logits; -inf forbids a
            token.
        init_carry: a tree of what goes from step to step. Tensors (B, *F) come to `step_fn` as (B, K, *F); 0-d tensors
            and numbers are shared. A TensorArray gets elements (B, K, *F) by its first append, grows, and shows each
            hypothesis its own past; one that has slots of (B, *F) already shows them to all hypotheses of the row.
        batch_size: int, the number of rows B.
        beam_size: int, at least 1: K, how many hypotheses of a row run at a time.
        bos_id: the token that every hypothesis begins with: an int for all rows, or (B,) or a list with one for each.
        eos_id: the token that ends a hypothesis: an int, or several. `hyps.ends` says which one did.
        context: a tree of tensors (B, ...) that `step_fn` is given and does not change, such as encoder states. None:
            it is not called with one.
        max_steps: int, the most tokens of a hypothesis, the eos counted. None: no limit, the search ends by `stop`.
        n_best: int, how many hypotheses of a row are returned; None is `beam_size`.
        length: the length model, which makes of a log-probability and a length what hypotheses are ranked by:
            `tl.beam.Sum()` (None), `Power`, `GNMT`, `BoundedReward`, or your own.
        choose: how the hypotheses that run on are chosen: `tl.beam.TopK()` (None), `Sample(...)` or `StochasticBeam()`.
        merge: a function of the carry that `step_fn` returned to keys, integers (B, K) or (B, K, *). Running hypotheses
            of a row with equal keys become one: the best goes on, with the logsumexp of their scores. So a key must
            hold all that the future depends on; else it is an approximation. None: nothing is merged.
        stop: when a row ends. "exact" (default): when nothing can come that belongs to its n best. "first_n": when n
            have ended. "hf": when the best running sum, scored at its length of now, is no better than the n-th.
            "never": at `max_steps`.
        eos: which hypotheses may end in a step. "always" (default): all. "top_k" and "top_2k": those whose end is among
            the K or 2K best continuations.
        capped: where hypotheses come that have not ended at `max_steps`. "last" (default): after all that have.
            "ranked": by their scores, as if they had.
        gold: PackedTensor (B, T*) of tokens without bos and eos, or None: the reference of each row. It is followed in
            a place of its own (`step_fn` then gets K + 1 hypotheses) and returned among the n best; `hyps.gold` says
            where. It ends with the first `eos_id`.
        checkpoints: which carries are kept for backward, as in `while_loop`: None keeps all, an int that many.
            Decisions are not made again.
        compact: bool, whether rows that have stopped leave the batch. None: where there is a `context`; a `step_fn`
            that closes over tensors with B rows cannot shrink.
        check: bool, default False: whether log_probs that do not sum to one are refused. Without it, probabilities of
            more than 1 are warned of, and then no row is "exact".
        progress: bool, default False: whether steps and running rows are shown.

    Returns:
        `tl.beam.Hypotheses`: tokens, scores and lengths of n_best hypotheses of each row, best first.

    Ties: the hypothesis that ended first, then the smaller beam index, then the smaller token.
    Gradient: of `scores`, `final` and `token_scores`, as forced decoding of the same hypotheses has it, to init_carry,
    context, and all that step_fn closes over. Decisions are constants. `scores` and `final` of merged hypotheses have
    that of the logsumexp: each gets its share.
    Cost: a step selects K of K * V continuations, and reorders the carry at a cost that does not grow; it keeps what
    step_fn's operations save, and O(K) numbers a row. One sync a step on a device, or a few. `merge` compares K * K
    numbers for each row, and sorts keys that are longer than one number.

    Raises:
        TypeError: an argument of another type, or a keyword that is none of these.
        ValueError: sizes or ids that do not fit, NaN, all tokens forbidden, a length model without a bound where
            nothing else ends the search, `merge` with samples or with `gold`.

    Sources: Huang et al. 2017 (1809.00069) for the optimal stop; `docs/beam.md` for the others.

    Example:
        >>> words = torch.tensor([0.5, 0.3, 0.2]).log()  # of the end, 1 and 2
        >>> def step(carry, tokens):
        ...     return carry, words.expand(*tokens.shape, 3)
        >>> hyps = tl.beam_search(step, (), batch_size=1, beam_size=3, bos_id=0, eos_id=0)
        >>> [row.tolist() for row in hyps.tokens.unbind()], hyps.scores.exp()
        ([[], [1], [2]], tensor([[0.5000, 0.1500, 0.1000]]))
        >>> def count(n, tokens):  # the carry is how often 2 came; 1 2 and 2 1 are merged
        ...     return n + (tokens == 2), words.expand(*tokens.shape, 3)
        >>> options = {"batch_size": 1, "beam_size": 4, "bos_id": 0, "eos_id": 0, "merge": lambda n: n}
        >>> hyps = tl.beam_search(count, torch.zeros(1, dtype=torch.int64), **options)
        >>> [row.tolist() for row in hyps.tokens.unbind()], hyps.scores.exp()
        ([[], [1], [2], [1, 2]], tensor([[0.5000, 0.1500, 0.1000, 0.0600]]))
    """
    batch_size, beam_size = at_least(0, batch_size, "batch_size"), at_least(1, beam_size, "beam_size")
    eos_ids = check_ids(eos_id, "eos_id")
    max_steps = None if max_steps is None else at_least(1, max_steps, "max_steps")
    n_best = beam_size if n_best is None else at_least(1, n_best, "n_best")
    length, choose = Sum() if length is None else length, TopK() if choose is None else choose
    ids = tuple(sorted(set(eos_ids)))
    rules = Rules(beam_size, n_best, ids, max_steps, length, choose, stop, eos, check, capped, merge)
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
