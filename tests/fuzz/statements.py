"""What a body may do, as templates by family: `scope.Holes` says what stands in braces; each binds a new name.

A template of several statements has them on lines of their own, and binds {o} itself.
"""
# ruff: noqa: E501

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

MAXIMA = r"""
({v} - {v}.mean(-1, keepdim=True)).amax(-1)
({v} * {u}).amax({d})
(torch.tanh({v}) * {a}).amin({d})
({v} * {p}).max()
({v} * {c} + {a}).min()
(({v} * {p}) - {v}.mean()).amax()
torch.linalg.vector_norm({v} * {p}, float("inf"))
torch.linalg.vector_norm({v} * {a}, float("inf"), -1)
({v} * {a}).norm(float("inf"), {d})
torch.linalg.vector_norm({v} * {p}, -float("inf"), {d})
torch.aminmax({v} * {a}).max - torch.aminmax({v}).min
({v} + {a}).aminmax(dim={d})[0]
({v} * {p}).median()
({v} * {a}).median({d}).values
({v} * {a}).nanmedian({d}).values
({v} * {p} + {a}).max({d}).values
({v} * {a} + {p}).min({d})[0]
F.layer_norm({v}, {v}.shape[-1:]).amax(-1)
({v}.softmax(-1) * {p}).amax(-1)
{v}.log_softmax(-1).amax({d})
{q} = {v} * {p} + {a}\n{o} = torch.where({q} < {q}.amax(-1, keepdim=True).detach(), torch.zeros_like({q}), {q})
{q} = {v} * {p}\n{o} = {q} * ({q} == {q}.amax({d}, keepdim=True))
{q} = {v} * {p} - {a}\n{o} = {q} * ({q} >= {q}.amax())
{q} = {v} * {p} + {w}\n{o} = {q}.masked_fill({q} < {q}.topk({k}, -1).values[..., -1:], 0.0)
{q} = ({v} * {p}).sin()\n{o} = torch.where({q} > {q}.amin({d}, keepdim=True), {q}, -{q})
{q} = {v} * {p}\n{o} = ({q} - {q}.max({d}, keepdim=True).values).exp().sum({d})
{q} = {v} @ {W}\n{o} = {q} * ({q} == {q}.amax(-1, keepdim=True))
({v} @ {W}).amax(-1)
({v} @ {W}).amax()
({v} * {p}).abs().amax({d}) + {v}.abs().amin()
({v} * {p}).floor() * {v}
{q} = {v} * 3 + {a}\n{o} = {q} - {q}.round()
{q} = {v} * {p} * 3\n{o} = {q} - {q}.trunc()
({v} * {p}).sign() * {a}
torch.remainder({v} * {p}, 0.4) * {a}
torch.fmod({v} * 3 + {p}, 0.7)
({v} * {p} + {a}).topk({k}, {d}).values
({v} * {p}).sort({d}).values
({v} * {p}).sort({d}, descending=True)[0].cumsum({d})
({v} * {p}).kthvalue(1, {d}).values
({v} * {p}).cummax({d}).values
({v} * {a}).cummin({d})[0]
{v}.gather({d}, ({v} * {p}).argmax({d}, keepdim=True))
F.one_hot(({v} * {p}).argmax(-1), {v}.shape[-1]).to({v}.dtype) * {v}
F.max_pool1d(({v} * {p})[None], 2)[0]
F.adaptive_max_pool1d(({v} * {p})[None], 1)[0]
torch.max({v} * {p}, {a})
torch.logsumexp({v} * {p}, {d})
({v} * {p}).cumprod({d})
torch.dist({v} * {p}, {a}, float("inf"))
torch.cdist({m} * {p}, {m} + 1.0)
({v} * {p}).renorm(2, 0, 0.5)
({v} > ({v} * {p}).quantile(0.5)).to({v}.dtype) * {v}
({v} * {p}).mode({d}).values
"""

EDGES = r"""
{v}.std()
{v}.std({d})
({v} * 0 + {p}).std()
torch.ones_like({v}).mul({p}).std(-1)
({v} - {v}.mean(-1, keepdim=True)) / ({v}.std(-1, keepdim=True) + 1e-3)
{v}.expand(3, *{v}.shape).std(0)
torch.std_mean({v}, {d})[0]
{v}.var({d}, correction=0).sqrt()
{v}.var()
torch.var_mean({v} * 0, {d})[0]
({v} - {v}).norm()
({v} * 0).norm(2, -1)
({v} * 0 + {a} * 0).norm(3)
{v}.norm(p=3)
{v}.norm(p=1, dim=-1)
{v}.norm(p=0.5)
torch.tanh({v} * 0.5 + {a}.norm(p=3))
torch.linalg.vector_norm({v} - {v}, dim={d})
F.normalize({v}, dim=-1)
F.normalize({v} * 0, dim=-1)
({v} * 0).sqrt().nan_to_num()
torch.sqrt({v} - {v} + {c})
({v} * 0).abs()
({v}.round()).amax()
({v} * 2).round().amax({d})
({v} > 0).sum()
({v} > 0).sum({d}) * {p}
({v} > 0).to({v}.dtype).mean() + {v}
({v} == 0).any({d}).to({v}.dtype)
({v} * 4).long().sum().to({v}.dtype)
({v} * 4).long() * {v}
({v} * 4).long() // 2 + {v}
({v} * 4).int().clamp(0, 2).to({v}.dtype) * {v}
{v}.argmax() * {v}
{v}.argmin(-1).to({v}.dtype)
{v}.count_nonzero() * {p}
{v}.nanmean()
{v}.nansum({d})
{v}.prod()
({v} * 0 + 1).prod({d})
({v} * (({v} > 0).to({v}.dtype))).prod(-1)
{v}.sign() * {w}
{v}.sgn()
torch.sgn({v})
{v} * torch.sign({w})
{v} * {w}.round()
{v} * torch.floor({w} * 2)
{v} + torch.ceil({w}).sum()
{v}.angle() + {v}
{v} * {w}.trunc() + {w}.sum()
{p}.abs() + {v}
{p}.max() * {p}.sign()
{p}.amax() + {p}.min() * {v}
{p}.median() * {v}
{p}.norm(float("inf")) * {v}
{p}.aminmax()[0] + {v}
{p}.nanmean() * {v}
{p}.sort()[0] + {v}
{p}.cumsum(0) + {p}.flip(0)
{p}.std(correction=0) + {v}
{p}.softmax(0) + {p}.logsumexp(0)
torch.max({p}, {p} * 2) * {v}
(({p} > 0) | ({p} < -5)).sum() + {v}
torch.clamp({v}, {p}.item() if False else -0.5, 0.5)
{v}.half().to({v}.dtype)
{v}.half().float().to({v}.dtype) * {w}
{v}.bfloat16().to({v}.dtype)
{v}.bool().to({v}.dtype) + {v}
{v}.float().sin().to({v}.dtype)
{v}.to(torch.int32).to({v}.dtype)
{v}.half().long().to({v}.dtype)
torch.complex({v}, {a}).abs()
torch.complex({v}, {a}).conj().imag
torch.view_as_real(torch.complex({v}, {a}) * 2j)[..., 0]
torch.isclose({v}, {a}).to({v}.dtype) * {v}
torch.sqrt({v} - {a})
torch.log({v} - {a})
1 / ({v} - {a} * {c})
torch.acos({v} + {a})
{v}.pow({a})
{v}.div({a} + {c}, rounding_mode="floor")
torch.sin({v} * 1e17)
torch.remainder({v} * 2**30, {a})
"""

INDICES = r"""
{v}.gather({d}, torch.zeros_like({v}, dtype=torch.long))
{v}.index_select({d}, {index})
{v}.index_select({d}, {index}).sum({d})
{v}.index_fill({d}, {index}, {c})
{v}.new_ones({v}.shape).index_fill({d}, {index}, {c}) * {v}
torch.zeros_like({v}).index_fill({d}, {index}, {c}) + {v}
{v}.index_add({d}, {index}, {v}.index_select({d}, {index}))
{v}.index_copy({d}, torch.tensor([0]), {a}.narrow({d}, 0, 1))
{v}.scatter({d}, torch.zeros_like({v}, dtype=torch.long).narrow({d}, 0, 1), {c})
{v}.scatter_add({d}, torch.zeros_like({v}, dtype=torch.long), {a})
{v}.scatter_reduce({d}, torch.zeros_like({v}, dtype=torch.long), {a}, "amax")
torch.trace({m}) * {p}
{m}.trace() + {m}.sum()
torch.trace({m} @ {m}.mT)
{v}.take(torch.tensor([0, -1]))
{v}[..., torch.tensor([0, 0])]
{v}[torch.tensor([0, -1])].sum(0)
{v}[({v}.abs().sum() * 7).long() % max({v}.shape[0], 1)]
{w}[({v}.sum() * 5).long() % max({w}.shape[0], 1)] * {v}
{v}.index_select(0, ({v}.flatten()[:2].abs() * 9).long() % max({v}.shape[0], 1))
F.embedding(({v}.abs() * 7).long() % 3, {W}[:3] if {W}.shape[0] > 2 else {W}.repeat(3, 1)).sum(-1)
torch.select({v}, {d}, {n}) + {p}
torch.select_scatter({v}, {v}.select({d}, 0) * 2, {d}, {n})
torch.slice_scatter({v}, {v}[:1] * {c}, 0, 0, 1)
torch.diagonal_scatter({m}, {m}.diagonal() * 2)
{v}.masked_scatter({a} > 0, {b})
{v}.masked_select({a} > 0).sum()
{v}[{a} > 0].sum()
torch.searchsorted({w}.sort(-1).values, {v}).to({v}.dtype)
torch.bucketize({v}, torch.tensor([-0.5, 0.0, 0.5])).to({v}.dtype) * {v}
torch.tensor([1.0, 2.0, 3.0], dtype={v}.dtype)[{k} - 1] * {v}
torch.arange({v}.shape[-1], dtype={v}.dtype) * {v}
torch.eye({v}.shape[-1], dtype={v}.dtype) + {v}
torch.linspace(0, 1, {v}.shape[-1], dtype={v}.dtype) * {v}
{v}.put(torch.tensor([0]), {v}.flatten()[:1] * 2)
torch.take_along_dim({v}, {v}.argsort({d}), {d})
{v}.argsort(-1).to({v}.dtype) * {v}
torch.tril_indices(2, 2).sum() * {v}
{v}.index_put((torch.tensor([0]),), {v}[:1] * {c}, accumulate=True)
torch.nn.functional.one_hot(({v}.flatten()[:3].abs() * 5).long() % 3, 3).sum() + {v}
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

SURROUNDINGS = r"""
with torch.no_grad():\n    {o} = {v}.sin() * {a}
{v}.detach() * {a}
{v}.sin().detach() + {w}
{o} = {v} * {c}\nif {v}.dim() and {v}.shape[0] > 2:\n    {o} = {o} + {a}
{o} = {v} * 1\nfor {q} in range({v}.dim()):\n    {o} = {o}.sin() + {q}
if call % 2:\n    {o} = {v}.sin()\nelse:\n    {o} = {v}.cos() * {a}
{v} * (1 + call)
{v} * (0.5 if call else 1.5) + {a}
{o} = {v} * 1\nif {o}.requires_grad:\n    {o}.register_hook(lambda g: g * 2)
{o} = {v}.sin()\nif call % 2 and {o}.requires_grad:\n    {o}.register_hook(lambda g: g * 0.5)
{o} = {v}.sin()\nif {o}.grad_fn is not None:\n    {o}.grad_fn.register_hook(lambda inputs, outputs: tuple(g * 2 for g in inputs))
with torch.autocast("cpu", dtype=[torch.bfloat16, torch.float16][call % 2]):\n    {o} = ({v}.float() @ {W}.float()).to({v}.dtype)
with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(call % 2)):\n    {o} = ({v}.float() @ {W}.float()).to({v}.dtype)
with torch.autocast("cpu", dtype=[torch.bfloat16, torch.float16][call % 2]):\n    {o} = ({v}.to(torch.bfloat16) @ {W}.float()).to({v}.dtype)
torch.func.vmap(lambda z: z.sin() * z.sum())({v})
torch.func.grad(lambda z: (z.sin() * z).sum())({v})
torch.func.vmap(torch.func.grad(lambda z: z.square().sum()))({v}) * 0.3
scripted({v}, {a})
overridden({v}, {a}) if call % 2 else overridden({v}, {b}) * 2
torch.utils.checkpoint.checkpoint(lambda z: z.sin() * z, {v}, use_reentrant=False)
tl.fori_loop(0, 2, lambda i, z: z.sin() + {a} * i, {v} * 1, compile=compile)
tl.fori_loop(0, {k}, lambda i, z: z * 0.5 + {a}, {v} * 1)
tl.scan(lambda z, y: (z + y.sin(), z), {v}[0] * 1, {v}, compile=compile)[0]
tl.scan(lambda z, y: (z * 0.5 + y, z), {v}[0] * 1, {v}, checkpoints=1)[1].sum(0)
tl.associative_scan(lambda a, b: a + b, {v})
F.dropout({v}, 0.5)
{v} + torch.rand_like({v})
{v} * torch.bernoulli(torch.full_like({v}, 0.5))
torch.randn({v}.shape, dtype={v}.dtype) * {v}
torch.autograd.grad({v}.sin().sum(), [{v}], create_graph=True)[0] if {v}.requires_grad else {v}
{o} = {v} * 1\nwith torch.enable_grad():\n    {o} = {o}.cos()
torch.nn.GRUCell({v}.shape[-1], {v}.shape[-1], dtype={v}.dtype)({v}, {a}) * 0 + {v}
{v}.data * {a}
{v} * len({v})
{v} * float({v}.shape[-1])
{v} * {v}.numel() + {v}.dim()
{v}.sum().item() * {a} if call > 5 else {a}
torch.utils._pytree.tree_map(torch.sin, [{v}, {a}])[1]
(lambda z, s=call: z * (s + 1))({v})
{v}.sin().requires_grad_({v}.requires_grad)
{v}.clone().contiguous(memory_format=torch.contiguous_format) * {w}
(getattr(torch, ["sin", "cos"][call % 2]))({v})
"""

FAMILIES = {
    "pointwise": (POINTWISE, 5.0),
    "views": (VIEWS, 3.0),
    "writes": (WRITES, 2.0),
    "maxima": (MAXIMA, 3.0),
    "edges": (EDGES, 3.0),
    "indices": (INDICES, 1.5),
    "sums": (SUMS, 3.0),
    "surroundings": (SURROUNDINGS, 1.0),
}


def templates(text: str) -> list[str]:
    """The templates of a family, each binding {o}."""
    lines = [line.replace("\\n", "\n") for line in text.strip().splitlines()]
    return [line if "{o}" in line else f"{{o}} = {line}" for line in lines]


TABLES = {name: templates(text) for name, (text, _) in FAMILIES.items()}
WEIGHTS = {name: weight for name, (_, weight) in FAMILIES.items()}
