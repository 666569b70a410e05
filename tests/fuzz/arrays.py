"""What a body does with a TensorArray in its carry: appends, and reads and writes at its edges."""

from tests.fuzz.scope import Scope

READS = """
{a}[-1]
{a}[0]
{a}[-2:].sum(0)
{a}[:2].mean(0)
{a}[-3:].sin().sum(0)
{a}[max(len({a}) - 2, 0):].sum(0)
{a}[max(len({a}) - 3, 0):].sum(0)
{a}[1:3].sum(0)
{a}[1:].sum(0)
{a}[:-1].sum(0)
{a}.stack().sum(0)
{a}.stack().mean(0)
{a}.stack()[-2:].sum(0)
{a}.stack()[-1]
{a}.stack()[0]
{a}.stack()[1:3].mean(0)
{a}.stack().amax(0)
{a}.stack().softmax(0)[0]
{a}.stack()[::2].sum(0)
{a}.stack().flip(0)[0]
{a}[2 % len({a})]
{a}[1 % len({a})]
{a}[len({a}) // 2]
{a}[len({a}) - 1]
{a}[max(len({a}) - 3, 0)]
{a}[max(len({a}) - 2, 0)]
{a}[min(len({a}) - 1, 2)]
{a}[-min(len({a}), 2)]
{a}[-2]
{a}[1]
{a}[3]
{a}[len({a}) - 2]
{a}[0] + {a}[-1]
{a}.gather(torch.tensor([0, len({a}) - 1])).sum(0)
{a}.gather(torch.tensor([0, 0])).mean(0)
{a}[0] * len({a})
({a}.stack() * {h}).sum(0)
torch.tensordot({a}.stack().flatten(1), {h}.flatten(), 1).sum()
({a}.stack().flatten(1) @ {h}.flatten()).softmax(0) @ {a}.stack().flatten(1)
sum({a}[j].sin() for j in range(len({a})))
{a}[:len({a}) - 1].sum(0)
{a}[len({a}) - 1:].sum(0)
{a}[len({a}) // 2:].sum(0)
{a}.stack().narrow(0, max(len({a}) - 2, 0), 1)[0]
{a}.stack().select(0, -1)
{a}.stack()[torch.tensor([-1, 0])].sum(0)
""".strip().splitlines()

WRITES = """
{a}.append({h})
{a}.append({h})
{a}.append({h}.sin())
{a}.append({h}.detach())
{a}.append({h} * 0)
{a}[-1] = {h}
{a}[0] = {h}
{a}[max(len({a}) - 2, 0)] = {h}
{a}[max(len({a}) - 1, 0)] = {h} * 2
{a}[len({a}) // 2] = {h}.cos()
{a}[1 % len({a})] = {h}
{a}[2 % len({a})] = {h}
{a}[-min(len({a}), 2)] = {h}
{a}[1] = {h}
{a}[len({a}) - 1] = {a}[0] * 0.5 + {h}
{a}[-2] = {h}
""".strip().splitlines()


def add_array(scope: Scope) -> None:
    """An array in the carry, which begins with some slots."""
    draw, name = scope.draw, f"a{len(scope.arrays)}"
    element = scope.example(scope.carry[0][0]).shape
    slots = draw.among({0: 3, 1: 3, 2: 2, 3: 1, 4: 0.5})
    if slots:
        outer = scope.input((slots, *element), "i")
        scope.header.append(f"{name}_first = tl.TensorArray.unstack({outer})")
        scope.values[name] = scope.values["Slots"](scope.values[outer].unbind(0))
    else:
        scope.header.append(f"{name}_first = tl.TensorArray()")
        scope.values[name] = scope.values["Slots"]()
    scope.arrays.append(name)


def use_array(scope: Scope, append: bool = False) -> bool:
    """A statement on one of the arrays."""
    draw, name = scope.draw, scope.draw.choice(scope.arrays)
    element = scope.example(scope.carry[0][0])
    same = [n for n in scope.tensors if (x := scope.example(n)).shape == element.shape and x.dtype == element.dtype]
    names = {"a": name, "h": draw.choice(same)}
    if append:
        return scope.add(f"{name}.append({names['h']})")
    if draw.chance(0.3):
        return scope.add(draw.choice(WRITES).format_map(names))
    return scope.add(f"{scope.fresh()} = {draw.choice(READS).format_map(names)}")
