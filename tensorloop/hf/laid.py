"""Where the tokens of rows stand in one packed pass, and which positions they have; prompts that several rows share."""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.attention import Tree
from tensorloop.hf.positions import Numbering, number_rows
from tensorloop.packed import Dim, PackedTensor


class Laid(NamedTuple):
    """Tokens (N,) as a model gets them, with the number that it gives to each one's position."""

    ids: Tensor
    positions: Tensor
    rows: PackedTensor  # the rows as they are for each completion by itself
    dim: Dim  # how the N tokens are divided
    trees: list[Tree] | None = None  # where rows share their first tokens


def lay_rows(rows: PackedTensor, numbering: Numbering | None) -> Laid:
    """Rows one after another."""
    return Laid(rows.values, number_rows(rows, numbering), rows, rows.dims[0])


def lay_completions(
    prompts: PackedTensor, completions: PackedTensor, group: int, numbering: Numbering | None
) -> tuple[Laid, Tensor]:
    """Each prompt and then its `group` completions, and the place of the token before each token of these."""
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
    trees = [Tree(0, stem, branches) for stem, branches in sizes]
    ends = accumulate((x.size for x in trees), initial=0)
    trees = [x._replace(start=start) for x, start in zip(trees, ends, strict=False)]
    return Laid(ids, positions, rows, dim, trees), torch.where(first, last, of_completions - 1)
