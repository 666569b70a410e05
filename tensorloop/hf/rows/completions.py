"""Log-probabilities of completions after their prompts, which run once for a group of them: `completion_logprobs`."""

from itertools import accumulate
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue, named
from tensorloop.attention import TokenTree
from tensorloop.hf.distribution import Distribution
from tensorloop.hf.positions import Numbering, find_numbering, number_rows
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.rows.forward import LaidRows, check_ids, check_model, lay_rows, score_rows
from tensorloop.hf.rows.heads import Wanted
from tensorloop.hf.rows.learned import lengthen
from tensorloop.hf.token_scores import Scoring
from tensorloop.packed import PackedTensor


@overload
def completion_logprobs(
    model: nn.Module,
    prompts: PackedTensor,
    completions: PackedTensor,
    *,
    return_entropy: Literal[True],
    return_aux_loss: Literal[False] = False,
    **options: Any,
) -> tuple[PackedTensor, PackedTensor]: ...
@overload
def completion_logprobs(
    model: nn.Module,
    prompts: PackedTensor,
    completions: PackedTensor,
    *,
    return_aux_loss: Literal[True],
    **options: Any,
) -> tuple[Any, ...]: ...
@overload
def completion_logprobs(
    model: nn.Module,
    prompts: PackedTensor,
    completions: PackedTensor,
    *,
    return_entropy: Literal[False] = False,
    return_aux_loss: Literal[False] = False,
    **options: Any,
) -> PackedTensor: ...
@named("hf.completion_logprobs")
def completion_logprobs(
    model: nn.Module,
    prompts: PackedTensor,
    completions: PackedTensor,
    *,
    group: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    chunk_size: int = 512,
    return_entropy: bool = False,
    return_aux_loss: bool = False,
    **options: Any,
) -> Any:
    """Gives the log-probability of each token of completions after their prompts, without padding.

    It is what policy gradients (RLOO, GRPO) and preference losses (DPO) need; its `sum(1)` are those of whole
    completions. With `group`, a prompt runs once, and its completions attend to it.

        log_probs = tl.hf.completion_logprobs(model, prompts, completions, group=8)
        log_probs, entropies = tl.hf.completion_logprobs(model, prompts, completions, return_entropy=True)

    Args:
        model: a model of transformers, decoder-only, as for `packed_forward`.
        prompts: PackedTensor (B, P*) int64.
        completions: PackedTensor (B * group, T*) int64: those of prompt b are rows b * group to b * group + group - 1,
            as `rollout(group=)` and `repeat_interleave` have them.
        group: int, default 1: how many completions each prompt has.
        temperature: float above 0, default 1: the logits are divided by it.
        top_k: int, then only so many of the likeliest tokens stay; None keeps all.
        top_p: float, and of those only the smallest set whose probability is at least this; None keeps all.
        min_p: float, and of those only tokens with at least this part of the likeliest one's probability; None keeps
            all. A token that is left out has a log-probability of -inf.
        chunk_size: int, default 512: logits are made for so many tokens at a time.
        return_entropy: bool, default False: whether the entropy at each token, of the same distribution, is returned
            too.
        return_aux_loss: bool, default False: whether the loss of the model's router, which balances its experts, is
            returned too, last: over all tokens, those of a prompt counted once.
        options: keywords that go to the model's forward.

    Returns:
        PackedTensor (B * group, T*) in the dtype of the logits, float32 at least; with `return_entropy` a pair
        (log_probs, entropies), with `return_aux_loss` a tuple whose last is that loss, a scalar.

    Softmax, sums and entropies are in float32 where the model computes in a smaller dtype; logits, and the sum of
    their head's gradient over chunks, are in the model's. In training mode a group shares what dropout takes from its
    prompt.

    Gradient: to the model. With `group` it is that of prompts repeated so often, summed.
    Cost: as packed_forward of both joined, a prompt counted once. Logits are made for the tokens of completions alone,
    `chunk_size` rows at a time, and again in backward, those of the last chunk excepted: see `token_logprobs`. All rows
    at once, and kept, where the weights of the head are sharded (FSDP with a unit for the head, tensor parallelism,
    DeepSpeed's third stage), or the forward of the model has no `logits_to_keep`.

    Raises:
        TypeError, ValueError: as packed_forward; an empty prompt before a completion, completions that are not `group`
            for each prompt, numbers out of range.
        RuntimeError: in backward, where weights of the head were changed since.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> prompts = tl.PackedTensor.from_list([torch.tensor([3, 4, 5]), torch.tensor([6])])
        >>> completions = tl.PackedTensor.from_list([torch.tensor(x) for x in ([7], [8, 9], [4, 4, 4], [2])])
        >>> tl.hf.completion_logprobs(model, prompts, completions, group=2).sum(1).shape
        torch.Size([4])
    """
    drawn = Distribution(temperature, top_k, top_p, min_p)
    scoring = Scoring(drawn, chunk_size, return_entropy, "hf.completion_logprobs").checked()
    inner = check_model(model)
    group = arguments.at_least(1, group, "group")
    _check_packed(prompts, completions)
    prompts, completions = prompts.to(torch.int64), completions.to(torch.int64)
    numbering = find_numbering(inner)
    if (learned := Learned.find(model)) is not None:
        if learned.is_keys:  # which have no states that predict a token
            _check_rows(prompts, completions, group)
        prompts = lengthen(learned, prompts, numbering)
    _check_rows(prompts, completions, group)
    laid, places = lay_completions(prompts, completions, group, numbering)
    tokens = completions.values

    def score(head: Any, states: Tensor, read: Any) -> Tensor:
        return scoring.run(head, states, tokens, read)

    arguments.as_bool(return_aux_loss, "return_aux_loss")
    found, aux = score_rows(model, inner, laid, options, Wanted(places, scoring.chunk_size, score, return_aux_loss))
    parts: list[Any] = [completions._with(x) for x in found.unbind(1)]
    parts += [] if aux is None else [aux]
    return tuple(parts) if len(parts) > 1 else parts[0]


def _check_packed(prompts: Any, completions: Any) -> None:
    for ids, what in ((prompts, "prompts"), (completions, "completions")):
        check_ids(ids, what)
    if prompts.device != completions.device:
        raise WrongValue(f"prompts is on {prompts.device}, completions on {completions.device}; move one with .to()")


def _check_rows(prompts: PackedTensor, completions: PackedTensor, group: int) -> None:
    if len(prompts.lens) * group != len(completions.lens):
        many = "" if group == 1 else f", not {group} for each of them"
        hint = "; group= says how many completions a prompt has" if group == 1 else ""
        raise WrongValue(f"prompts has {len(prompts.lens)} rows, completions {len(completions.lens)}{many}{hint}")
    lone = (prompts.lens == 0) & (completions.lens.view(-1, group) > 0).any(1)
    if bool(lone.any()):
        row = int(lone.nonzero()[0])
        raise WrongValue(f"prompts[{row}] is empty, so that nothing predicts its completion's first token; put a <bos>")


def lay_completions(
    prompts: PackedTensor, completions: PackedTensor, group: int, numbering: Numbering | None
) -> tuple[LaidRows, Tensor]:
    """Lays each prompt before its `group` completions, and finds the place of the token before each of their tokens."""
    owner = torch.arange(len(prompts.lens), device=prompts.device).repeat_interleave(group)
    each = prompts if group == 1 else prompts[owner]
    rows: Any = torch.cat([each, completions], 1)
    before = each.lens[completions.row_ids]  # tokens of the prompt
    first, at = completions.positions == 0, completions.positions
    if group == 1:
        places = rows.dims[0].offsets[:-1][completions.row_ids] + before + at - 1
        return lay_rows(rows, numbering), places
    lens = completions.lens.view(-1, group)
    dim = PackedTensor(rows.values.new_zeros(int(prompts.lens.sum() + lens.sum())), prompts.lens + lens.sum(1)).dims[0]
    starts = dim.offsets[:-1]
    begin = (starts + prompts.lens)[:, None] + lens.cumsum(1) - lens  # (B, group), where completions begin
    of_prompts = starts[prompts.row_ids] + prompts.positions
    of_completions = begin.flatten()[completions.row_ids] + at
    last = (starts + prompts.lens - 1)[owner][completions.row_ids]  # of the prompt
    numbers, numbered = number_rows(prompts, numbering), number_rows(rows, numbering)
    ids, positions = (x.new_empty(dim.total) for x in (rows.values, numbered))
    ids[of_prompts], ids[of_completions] = prompts.values, completions.values
    positions[of_prompts] = numbers
    positions[of_completions] = numbered[rows.dims[0].offsets[:-1][completions.row_ids] + before + at]
    sizes = zip(prompts.lens.tolist(), lens.tolist(), strict=True)
    trees = [TokenTree(0, stem, branches) for stem, branches in sizes]
    ends = accumulate((x.size for x in trees), initial=0)
    trees = [x._replace(start=start) for x, start in zip(trees, ends, strict=False)]
    return LaidRows(ids, positions, rows, dim, trees), torch.where(first, last, of_completions - 1)
