"""What to write in place of a line whose bytes grow faster than T."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LineOperation:
    """An operation of a line: its name, whether backward ran it, whether this library called it for the line."""

    operation: str
    backward: bool
    ours: bool
    repeated: bool = False
    """Whether it runs more often the larger T is: a loop runs it."""
    varied: bool = False
    """Whether its results differ in size."""


_READS = {"select_backward", "slice_backward", "unfold_backward", "diagonal_backward", "index_select_backward"}
_BUFFERS = {"new_empty_strided", "empty_strided", "clone", "new_zeros", "zeros", "zeros_like", "new_empty"}
_GATHERS = {"index_select", "gather", "index", "take"}
_WRITES = {"index_put", "scatter", "scatter_add", "index_copy", "index_add", "select_scatter", "slice_scatter"}
_MASKS = {"where", "masked_scatter", "lerp"}
_FILLS = ("inf", "1e")  # masks scores: -inf, finfo, -1e9
_PLAIN = "_safe_softmax"  # what scaled_dot_product_attention runs where none of its kernels takes the call
_ATTENTION = {"_softmax", _PLAIN}
_WEIGHTS = {*_ATTENTION, "_log_softmax"}
_DROPOUT = {"empty_like", "native_dropout", "bernoulli"}  # on the CPU, on CUDA, elsewhere

CAT = (
    "torch.cat copies all earlier steps at every step. Use a tl.TensorArray: array.append(x), and array[:t] to read "
    "them back, a view."
)
STACK = (
    "The list is stacked anew at every step. Use a tl.TensorArray: array.append(x), and array[:t], a view; or stack "
    "once, after the loop."
)
READ = (
    "The gradient of each read is a whole tensor of zeros. Read slots through tl.TensorArray.unstack(xs), or give xs "
    "to tl.scan; for xs[t] alone, xs.unbind(0) before the loop does too."
)
ASSIGNED = (
    "Backward copies the whole buffer for every assignment. Use a tl.TensorArray: array.write(t, x), or "
    "array.append(x), and array.stack() after the loop."
)
WRITE = (
    "The whole buffer is copied to change a part of it. Use a tl.TensorArray: array.write(i, x), or "
    "array.write_rows(positions, x)."
)
MASK = (
    "torch.where makes the whole buffer anew at every step. Use a tl.TensorArray: array.write_rows(positions, x, "
    "where=mask) touches one slot a row; tl.while_loop freezes rows that stop."
)
CLONE = (
    "The whole buffer is copied at every step. Reads of a tl.TensorArray, array[:t], stay what they were when it is "
    "written to later: no copy is needed."
)
REORDER = (
    "The whole history is gathered anew at every step. Keep it in a tl.TensorArray in the carry of tl.beam_search, "
    "which reads it through a table of ancestors; elsewhere reorder the state of one step alone."
)
OVERWRITTEN = (
    "An array that is overwritten and read in full is copied each time. Carry it through tl.scan or tl.while_loop "
    "with checkpoints=K: an overwrite then keeps one slot."
)
WEIGHTS = (
    "Each step keeps its attention weights over all earlier steps. tl.attention(q, keys, values) with keys and values "
    "in TensorArrays makes them again in backward."
)
ALL_PAIRS = (
    "Attention keeps its weights over all pairs of steps. torch.nn.functional.scaled_dot_product_attention keeps none, "
    "nor does nn.MultiheadAttention with need_weights=False, both without dropout."
)
DROPOUT = (
    "With dropout scaled_dot_product_attention has no kernel here: it keeps its weights over all pairs of steps. With "
    "dropout_p=0 (dropout=0 in nn.MultiheadAttention) it keeps none; drop out its result instead. Or let "
    "torch.utils.checkpoint make the weights again in backward."
)
PLAIN = (
    "scaled_dot_product_attention has no kernel for this call and keeps its weights over all pairs of steps: a mask "
    "that requires grad, or values of another size than queries. tl.attention(q, k, v) keeps none; "
    "torch.utils.checkpoint makes them again in backward."
)
MEMORY = (
    "Each step keeps its attention weights over a whole sequence that is there from the start, such as an encoder's "
    "states. With its keys and values made once, before the loop, torch.nn.functional.scaled_dot_product_attention "
    "keeps no weights. For other scores, tl.scan with checkpoints=K keeps K carries and computes the weights again."
)
GATHERED = (
    "A whole sequence is gathered at every step. One that is there from the start is gathered once, before the loop; "
    "a history that beams reorder belongs in a tl.TensorArray in the carry of tl.beam_search."
)
ONCE = (
    "It is made in one go, not step by step. torch.utils.checkpoint makes it again in backward; a block of rows at a "
    "time, it is never whole."
)
KEPT = (
    "Each step keeps what it computes on a whole sequence of steps. tl.scan or tl.while_loop with checkpoints=K keeps "
    "K carries and computes the rest again."
)


def advice(parts: Mapping[LineOperation, int], code: str, keeps: bool) -> str | None:
    """Says what to write instead of a line that grows faster than T; None where nothing is known.

    Args:
        parts: the operations of a line that grow faster than T, and their bytes at the largest T.
        code: the line.
        keeps: whether saved bytes grow, not peak or traffic alone.
    """
    if any(part.operation == _PLAIN for part in parts):
        if any(part.operation in _DROPOUT and not part.backward for part in parts):
            return DROPOUT
        if not any(part.operation == _PLAIN and part.varied and part.repeated for part in parts):
            return PLAIN
    largest_first = sorted(parts, key=lambda part: -parts[part])
    forward = [part for part in largest_first if not part.backward]  # what backward makes is not saved
    for part in (keeps and forward) or largest_first:
        found = _advice_for(part, code) if part.repeated else None
        if not part.repeated and part.operation in _ATTENTION and not part.backward:
            found = ALL_PAIRS
        if found is not None:
            return found
    return (KEPT if forward[0].repeated else ONCE) if keeps and forward else None


def _advice_for(part: LineOperation, code: str) -> str | None:
    if part.backward:
        if part.varied:  # not one buffer that all steps share
            return None
        if part.operation in _READS:
            return READ
        # `buffer[t] = x` and `xs[index]`: the engine makes both of the same operations
        if part.operation in _BUFFERS and not part.ours:
            return ASSIGNED if _assigns(code) else READ if "[" in code else None
        return None
    if part.ours:
        return OVERWRITTEN
    forward = {
        **dict.fromkeys(_GATHERS, REORDER if part.varied else GATHERED),
        **dict.fromkeys(_WRITES, WRITE),
        **(dict.fromkeys(_WEIGHTS, WEIGHTS) if part.varied else dict.fromkeys(_ATTENTION, MEMORY)),
    }
    if not part.varied and not any(name in code for name in _FILLS):
        forward.update(dict.fromkeys(_MASKS, MASK))
    if part.varied:  # a history that gets longer, and no sequence that is joined with a state
        forward.update(stack=STACK, cat=STACK if "stack" in code else CAT)
    if "clone" in code:
        forward["clone"] = CLONE
    return forward.get(part.operation)


def _assigns(code: str) -> bool:
    """Whether the line is `name[...] = ...`, or calls copy_ on a part."""
    target, _, value = code.partition("=")
    return ".copy_(" in code or (target.rstrip().endswith("]") and not value.startswith("="))
