"""What a body may do, as templates by family: `scope.Holes` says what stands in braces; each binds a new name.

A template of several statements has them on lines of their own, and binds {o} itself.
"""

POINTWISE = r"""
{v}.sin()
torch.tanh({v} * {c})
({v}.abs() + 0.5).sqrt()
torch.exp(-{v}.abs())
torch.log1p({v}.square())
{v}.sigmoid() * {w}
{v} * {w} + {c}
{v} + {a} * {c}
{v} - {u}
{v} / ({a}.abs() + 1)
torch.where({v} > {c}, {a}, {b})
torch.where({v} >= {a}, {v} * 2, {b})
torch.maximum({v}, {a})
torch.minimum({v}, {w})
torch.atan2({v}, {a} + 2)
{v}.clamp(-{k} * 0.5, {k} * 0.5)
{v}.clamp(min={c})
torch.clamp({v}, min={a}.detach())
torch.hypot({v}, {a} + 1)
{v}.relu() - 0.1 * {a}.abs()
F.gelu({v})
F.softplus({v})
F.leaky_relu({v}, 0.2)
F.hardtanh({v})
F.silu({v}) + {p}
torch.lerp({v}, {a}, 0.3)
torch.addcmul({v}, {a}, {b}, value=0.5)
torch.addcdiv({v}, {a}, {b}.abs() + 1)
{v}.pow(2)
({v}.abs() + 0.1) ** 1.5
{v} ** {k}
torch.reciprocal({v}.square() + 1)
{v}.rsqrt().nan_to_num(posinf=1.0) * 0.1
{v}.square().sin() * {p}
({v} * {p}).cos()
torch.logaddexp({v}, {a})
torch.xlogy({v}.abs(), {a}.abs() + 0.1)
torch.special.entr({v}.abs() + 0.1)
torch.sinc({v})
{v}.erf()
F.softsign({v})
F.mish({v})
F.elu({v})
{v}.nan_to_num() * 0.5
{v}.masked_fill({a} > 0, {c})
-{v} + {p}
torch.heaviside({v}, {a}) * {b}
torch.copysign({v}, {a})
torch.logit({v}.sigmoid() * 0.8 + 0.1)
torch.square({v} - {w})
"""

VIEWS = r"""
{m}.transpose(0, 1).sin()
{m}.transpose({d}, {e})
{m}.mT @ {W} if {m}.shape[-2] == {m}.shape[-1] else {m}.mT
{m}.permute(*range({m}.dim() - 1, -1, -1)).cos()
{v}.select({d}, {n})
{v}.select({d}, {n}) * {c}
{v}.narrow({d}, {n}, 1)
{v}[..., :{k}].sum(-1)
{v}[..., -{k}:]
{v}[..., ::2].exp()
{v}[{n}:]
{v}[None] + {w}
{v}.unsqueeze({d})
{v}.flatten() * 2
{v}.reshape(-1)
{v}.reshape(-1).view({v}.shape).sin()
{v}.squeeze().sin()
{v}.flip({d})
{v}.roll({k}, {d})
{v}.expand(2, *{v}.shape).sum(0)
{v}.unsqueeze(-1).expand(*{v}.shape, 3).mean(-1)
{m}.diagonal().sin()
{m}.diagonal(1, -2, -1)
torch.diag_embed({v})
torch.as_strided({v}, ({v}.numel() // 2,), (2,)).sin()
torch.as_strided({v}, ({v}.numel() // 2,), (2,), {v}.storage_offset() + 1).sum()
torch.as_strided({v}.contiguous(), ({v}.numel() // 2,), (1,)) * {c}
torch.as_strided({v} * 2, (max({v}.numel() - 1, 0), 2), (1, 1)).sum(1)
torch.as_strided({v} + 0.5, ({v}.numel(),), (0,)).cos() if {v}.numel() else {v}
{m}.as_strided(({m}.shape[-1], {m}.shape[-2]), (1, {m}.shape[-1])).tanh()
{v}.unfold({d}, 1, 1).sum(-1)
{v}.unfold(-1, 2, 1).prod(-1)
{v}.movedim({d}, {e})
{v}.unflatten(-1, (-1, 1)).squeeze(-1)
torch.stack([{v}, {a}], {d}).mean({d})
torch.cat([{v}, {a}], {d})
torch.cat([{v}, {v}[..., :1]], -1)
{v}.chunk(2, {d})[0].sin()
{v}.split({k}, {d})[-1]
{v}.unbind({d})[{n}] * {v}.unbind({d})[0]
{v}.repeat(2, *[1] * {v}.dim())[{k} - 1]
{v}.repeat_interleave(2, {d})
{v}.view_as({a}).clone()
torch.broadcast_to({v}, (2, *{v}.shape))[0]
{m}.swapaxes(0, 1).contiguous().sin()
{m}.tril() - {m}.triu(1)
{v}.T.sin() if {v}.dim() == 2 else {v}.sin()
{v}.view(-1)[:1]
torch.atleast_2d({v}).sum(0)
F.pad({v}, (1, 0))
F.pad({v}, (-1, 1), value={c})
F.pad({v}[None, None], (1, 1), mode="circular")[0, 0] if {v}.dim() == 1 else {v}
"""

WRITES = r"""
{o} = {v}.clone()\n{o}[..., 0] *= {c}
{o} = {v} * 1.0\n{o}.add_({a})
{o} = {v} + 0.0\n{o}[..., :1] = {a}[..., -1:]
{o} = {v}.clone()\n{q} = {o}[..., 1:]\n{q}.mul_({c})
{o} = {v}.clone()\n{o}.transpose(0, -1).add_({c})\n{o} = {o}.sin()
{o} = {m}.clone()\n{o}.diagonal().copy_({m}.diagonal() * 2)
{o} = {m} * 1.5\n{o}.diagonal().mul_({p})
{o} = {m}.clone()\n{o}.fill_diagonal_({c})
{o} = {v}.clone()\n{o}.as_strided(({v}.numel() // 2,), (2,)).mul_({c})
{o} = {v}.contiguous() * 1\n{o}.view(-1)[::2].add_({p})
{o} = torch.zeros_like({v})\n{o}[..., :1] = {v}[..., :1]
{o} = torch.zeros_like({v})\n{o}.copy_({a})\n{o}.clamp_(-1, 1)
{o} = {v}.new_zeros(({k}, *{v}.shape))\n{o}[0] = {v}\n{o}[-1] += {a}
{o} = torch.empty_like({v})\n{o}.copy_({v})\n{o}.sin_()
{o} = {v}.clone()\n{o}.masked_fill_({a} > {c}, 0.5)
{o} = {v}.clone()\n{o}[{a} > 0] = {c}
{o} = {v}.clone()\n{o}.index_fill_({d}, {index}, {c})
{o} = {v}.clone()\n{o}.index_add_({d}, {index}, {a}.index_select({d}, {index}))
{o} = {v}.clone()\n{o}.select({d}, {n}).zero_()
{o} = {v}.clone()\n{o}.select({d}, {n}).add_({p})\n{o}.mul_(0.5)
{o} = {v}.clone()\n{o}.unfold(-1, 1, 1).mul_({c})
{o} = {v}.clone()\n{q} = {o}.unsqueeze(0)\n{q}.mul_({w})\n{o} = {o} + {q}[0]
{o} = {v}.clone()\n{o}.addcmul_({a}, {b})
{o} = {v}.abs() + 1\n{o}.pow_({k})\n{o}.rsqrt_()
{o} = {v}.clone()\n{o}.sigmoid_().mul_({v})
{o} = {v}.clone()\n{o}.scatter_(-1, torch.zeros_like({v}, dtype=torch.long), {a})
{o} = {v}.clone()\n{o}[-1:], {q} = {o}[:1] * 2, 0
{o} = {v}.clone()\n{o}.swapaxes_(0, -1)\n{o} = {o} * {c}
{o} = {v}.clone()\n{o}.flip(0).mul_(3)
{o} = torch.full_like({v}, {c})\n{o}[..., 0] = {v}[..., 0]
{o} = {v}.new_empty({v}.shape).fill_({c})\n{o} += {v}
{o} = torch.where({v} > 0, {v}, {a})\n{o}.neg_()
{o} = {v}.clone()\n{o}.expand(2, *{v}.shape)[1].add_(1)
{o} = {v}.clone()\n{o}.reshape(-1)[-1:].mul_({p})
"""

SUMS = r"""
{v}.sum() * {c}
{v}.sum({d})
{v}.sum({d}, keepdim=True) * {a}
{v}.mean()
{v}.mean(-1, keepdim=True) + {w}
{v}.softmax({d})
{v}.log_softmax(-1)
{v}.logsumexp({d})
{v}.cumsum({d})
{v}.cumprod(-1)
{v}.logcumsumexp({d})
{v}.flip({d}).cumsum({d}).flip({d})
{v}.norm()
{v}.square().sum({d}).add(1).sqrt()
torch.linalg.vector_norm({v}, dim={d})
{v} @ {W}
({v} @ {W}).tanh()
{v} @ ({W} * {c}).abs()
{m} @ {m}.mT
torch.einsum("...i,...i->...", {v}, {a})
torch.einsum("...i,...j->...ij", {v}, {a})
torch.outer({v}.flatten(), {a}.flatten()[:3])
F.linear({v}, {W}.mT)
F.layer_norm({v}, {v}.shape[-1:])
F.rms_norm({v}, {v}.shape[-1:])
F.group_norm({M}, 1)
F.cosine_similarity({v}, {a}, -1)
F.mse_loss({v}, {a})
F.smooth_l1_loss({v}, {a})
F.cross_entropy({v}[None].flatten(0, -2), torch.zeros({v}.numel() // max({v}.shape[-1], 1), dtype=torch.long))
F.conv1d({M}[:1, :1], {w}[:1, :1])
F.avg_pool1d({v}[None], 2)[0]
torch.bmm({M}[:, :2], {M}[:, :2].mT) if {M}.dim() == 3 else {M}.sum()
torch.addmm({m}, {m}, {m}.T) if {m}.dim() == 2 and {m}.shape[0] == {m}.shape[1] else {m}
torch.dot({v}.flatten(), {a}.flatten())
{v}.diff(dim={d})
torch.trapezoid({v}, dim={d})
F.scaled_dot_product_attention({m}, {m}, {m} * 2)
{v}.dot({a}) if {v}.dim() == 1 else {v}.sum(-1)
torch.kron({v}, {a})
torch.cross({v}[..., :3], {a}[..., :3], dim=-1)
{v}.cov() if {v}.dim() == 2 else {v}
torch.cumulative_trapezoid({v}, dim={d})
torch.linalg.norm({m})
torch.vander({v}) if {v}.dim() == 1 else {v}.sin()
"""
