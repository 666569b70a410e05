"""Templates, as in `statements`, of what goes wrong most: comparisons with own maxima, ties, zeros, places, blocks."""
# ruff: noqa: E501

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
({v} * {p}).amax({d}) - ({v} * {a}).amin({d})
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
torch.sin(torch.round({v} * 4) * 2.0**57)
(({v} * 4).round() * 2.0**60).cos() + {v}
torch.tan(torch.round({v} * 4) * 2.0**56).clamp(-3, 3)
torch.remainder(torch.round({v} * 4) * 2.0**40, 3.0) * {a}
torch.fmod(torch.round({v} * 4) * 2.0**40, 0.75) * {a}
(torch.round({v} * 4) / 0.0).div(2.0, rounding_mode="floor").nan_to_num(0.5, 1, -1)
({v} - 2 > 0).sum() * 1.5 + {v}
torch.sqrt(({v} - {a} * {c}).relu())
({v}.relu() + {a}.relu()).sqrt().clamp(max=3)
torch.log({v}.relu())
({v} * 3 + 100).bfloat16().var(-1).to({v}.dtype)
F.group_norm(({M} * 3 + 100).bfloat16(), 1).to({v}.dtype)
F.layer_norm(({v} * 3 + 50).bfloat16(), {v}.shape[-1:]).to({v}.dtype)
2 ** torch.complex({v}, {a}).real
F.cosine_similarity({v}, {a}, 0)
{v}.float().log1p().nan_to_num().double().to({v}.dtype)
torch.atanh({v} * 0.3)
{v} * {z}
{v} + {z} % 3
({z} * 2).to({v}.dtype) * {v}
{v}.sin() * ({z} > 1)
{v}[{z} % max({v}.shape[0], 1)] if {z}.dim() == 0 else {v}
{v}.index_select(0, ({z} % max({v}.shape[0], 1)).flatten()[:1])
torch.full_like({v}, 2.5) ** {z}
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
torch.trace({m}) * {m}
{m}.sin().trace() * {m}.mT
torch.trace({m}) * {m}.sum(0) + {m}.cos().trace()
torch.zeros_like({v}).index_fill({d}, {index}, {p})
{v}.new_zeros(3).index_fill(0, torch.tensor([0, 2]), {p}) + {p}
torch.ones(2, 3, dtype={v}.dtype).index_fill_(1, torch.tensor([1]), {p})
torch.zeros({k}, {k}, dtype={v}.dtype).fill_diagonal_(2.0) * {p}
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
with torch.autocast("cpu", dtype=[torch.bfloat16, torch.float16][call % 2]):\n    {o} = {v}.float() @ {W}.float()
with torch.autocast("cpu", dtype=[torch.float16, torch.bfloat16][call % 2]):\n    {o} = {v}.float() @ {W}.float()
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
overridden({v}, {a})
overridden({v}, {w}).sum() * {a}
scripted({v} * {w}, {a})
scripted({v}, {a} * {w}) + {p}
F.conv1d({w}.reshape(1, 1, -1), {w}.reshape(1, 1, -1)[..., :1])[0, 0]
{w}.sin() * {w}
({w} * 2).sign() * {v}
{v}.to("meta")
{v}.cpu() * {a}.to("cpu")
torch.autograd.grad(({v} * {a}).sum(), [{v}])[0] if {v}.requires_grad else {v}
"""
