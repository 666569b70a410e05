"""The RNN-T lattice as a formula: what its kernels `rnnt_loss` compute, in operations that can be differentiated.

A row of T frames and U tokens has the entries (t, u), 0 <= t < T, 0 <= u <= U, u running faster. An entry is left by a
blank, to (t + 1, u), or by token u, to (t, u + 1); a path begins at (0, 0) and ends by the blank of (T - 1, U).

Source: Graves 2012, equations 16 to 18.
"""

import torch
from torch import Tensor

_FAR = -1e30  # for no path: minus infinity would have NaN for its gradient


def rnnt_formula(scores: Tensor, offsets: Tensor, widths: Tensor) -> Tensor:
    """(B,): minus the log of the sum over paths, of scores (N, 2), of the blank and of the token at each entry.

    Rows are cut by offsets (B + 1,); widths (B,) are U + 1. Rows without frames have no path, but one where U = 0.
    """
    lens, count = offsets.diff(), len(widths)
    frames = lens // widths
    if not len(scores):
        return scores.sum() * 0 + torch.where(widths > 1, torch.inf, 0).to(scores.dtype)
    width, steps = int(widths.max()), int((frames + widths).max()) - 1
    rows = torch.repeat_interleave(torch.arange(count, device=scores.device), lens)
    places = torch.arange(len(scores), device=scores.device) - offsets[rows]
    t, u = places // widths[rows], places % widths[rows]
    # By diagonals t + u, a column for each u.
    index = (rows * steps + t + u) * width + u
    grid = scores.new_zeros(count * steps * width, 2).index_copy(0, index, scores.clamp(min=_FAR))
    grid = grid.view(count, steps, width, 2)
    now = torch.full((count, width), _FAR, dtype=scores.dtype, device=scores.device)
    now = torch.where(torch.arange(width, device=scores.device) == 0, 0, now)
    every = [now]
    for d in range(steps - 1):
        down, right = now + grid[:, d, :, 0], (now + grid[:, d, :, 1])[:, :-1]
        right = torch.nn.functional.pad(right, (1, 0), value=_FAR)
        now = torch.stack([down, right]).logsumexp(0).clamp(min=_FAR)  # logaddexp: NaN, differentiated twice
        every.append(now)
    last = ((frames + widths - 2).clamp(min=0), widths - 1)
    b = torch.arange(count, device=scores.device)
    found = torch.stack(every, 1)[b, last[0], last[1]] + grid[b, last[0], last[1], 0]
    found = torch.where(frames == 0, torch.where(widths > 1, 2 * _FAR, 0), found)
    return torch.where(found < _FAR / 2, torch.inf, -found)
