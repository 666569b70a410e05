"""The pictures of docs/recipes.md: what each recipe does, and the bytes it keeps for backward over the number of steps.

python -m docs.examples.recipes.pictures [ode diffusion act kalman rnnt self_forcing]
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from torch import Tensor, nn

import tensorloop as tl
from docs.examples.recipes import act, diffusion, kalman, ode, rnnt, self_forcing
from tensorloop import memory

matplotlib.use("agg")
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
FOLDER = Path(__file__).parents[2] / "images"
STYLES = ((GREY, "o", "--"), (BLUE, "s", "-"), (GREEN, "D", "-."))

Ways = Mapping[str, Callable[[int], Callable[[], Tensor]]]  # a label -> of a size, a loss


def bytes_over(axes: Axes, sizes: Sequence[int], ways: Ways, steps: str) -> None:
    """Curves of the bytes kept for backward, on log axes, with their labels at the end."""
    for (label, way), (colour, marker, line) in zip(ways.items(), STYLES, strict=False):
        kept = [memory.saved_bytes(way(n)) / 2**10 for n in sizes]
        print(f"{label}: {', '.join(f'{n}: {k:,.1f} KiB' for n, k in zip(sizes, kept, strict=True))}")
        axes.plot(sizes, kept, color=colour, marker=marker, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    if len(ways) > 2:  # room for as many labels above the curves
        axes.set_ylim(top=8 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel(steps)
    axes.set_title("kept for backward, KiB", loc="left", fontsize=10)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8.5, frameon=False)


def draw_ode(left: Axes, right: Axes) -> None:
    """Swings of a pendulum from rest, small and large: a row with few steps and one with many."""

    def pendulum(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[:, 1], -y[:, 0].sin()], 1)

    start = torch.tensor([[0.5, 0.0], [3.1, 0.0]], dtype=torch.float64)
    for b, (colour, name) in enumerate(((BLUE, "a small swing"), (ORANGE, "over the top, nearly"))):
        solver = ode.Dopri5(pendulum, 1e-6, 1e-6, start, guarded=True)
        state, row = solver.start(torch.zeros(1).double(), start[b : b + 1]), (torch.tensor([20.0]).double(),)
        times, angles = [0.0], [float(start[b, 0])]
        while solver.goes_on(state, row):
            state = solver.step(state, row)
            times.append(float(state.t))
            angles.append(float(state.y[0, 0]))
        fine = torch.linspace(0, 20, 200).double()
        curve = ode.solve_at(pendulum, start[b : b + 1], fine)[:, 0, 0]
        left.plot(fine, curve, color=colour, linewidth=1)
        left.plot(times, angles, ".", color=colour, markersize=5, label=f"{name}: {len(times) - 1} steps")
    left.set_ylim(-5, 3.5)
    left.set_title("angle of a pendulum over time; dots are steps", loc="left", fontsize=10)
    left.legend(fontsize=8.5, frameon=False, loc="lower left")

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(length: int, **options: Any) -> Callable[[], Tensor]:
        y = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        return lambda: ode.solve(lambda t, y: pendulum(t, y) + net(y), y, 0.0, float(length), **options).y.sum()

    ways: Ways = {"all steps kept, as in a plain loop": loss, "16 checkpoints": lambda n: loss(n, checkpoints=16)}
    bytes_over(right, (2, 4, 8, 16, 32), ways, "length of the interval")


def draw_diffusion(left: Axes, right: Axes) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = diffusion.Denoiser()
    diffusion.train(
        model, lambda: diffusion.denoising_loss(model, diffusion.make_ring(512, generator), generator), 1500, 2e-3
    )
    tuned = copy.deepcopy(model)

    def loss() -> Tensor:
        noise = torch.randn(128, 2, generator=generator)
        return -diffusion.to_the_right(diffusion.sample(tuned, noise, 40, checkpoints=8)).mean()

    diffusion.train(tuned, loss, 12, 1e-3)
    noise = torch.randn(400, 2, generator=generator)
    with torch.no_grad():
        for net, colour, name in ((model, GREY, "as trained"), (tuned, BLUE, "after 12 updates by the reward")):
            left.plot(*diffusion.sample(net, noise, 40).T, ".", color=colour, markersize=3, label=name)
    left.set_aspect("equal")
    left.set_ylim(-1.4, 1.9)
    left.legend(fontsize=8.5, frameon=False, loc="upper left")
    left.set_title("samples; the reward is to be on the right", loc="left", fontsize=10)
    few = noise[:64]
    ways: Ways = {
        "as a plain loop": lambda T: lambda: diffusion.plain_sample(model, few, T).sum(),
        "8 checkpoints": lambda T: lambda: diffusion.sample(model, few, T, checkpoints=8).sum(),
        "the last 8 steps alone": lambda T: lambda: diffusion.sample(model, few, T, last=8).sum(),
    }
    bytes_over(right, (16, 32, 64, 128, 256), ways, "steps of the sampler")


def draw_act(left: Axes, right: Axes) -> None:
    generator = torch.Generator().manual_seed(0)
    for price, (colour, _, line) in zip((3e-3, 3e-2, 1e-1), STYLES, strict=True):
        torch.manual_seed(0)
        model = act.Pondering(6, 32)
        adam, taken, right_ones = torch.optim.Adam(model.parameters(), 3e-3), [], 0.0
        for update in range(500):
            xs, targets = act.make_parities(2, 64, 6, generator)
            loss = act.compute_loss(model, xs, targets, price, checkpoints=2)
            adam.zero_grad()
            loss.backward()
            adam.step()
            if update % 20 == 0 or update == 499:
                with torch.no_grad():
                    xs, targets = act.make_parities(1, 512, 6, generator)
                    logits, _, steps = model(xs)
                right_ones = ((logits > 0) == (targets > 0)).float().mean()
                taken.append(float(steps.mean()))
        label = f"a step costs {price:g}: {right_ones:.0%} right in the end"
        left.plot([*range(0, 500, 20), 499], taken, color=colour, linestyle=line, label=label)
    left.set_xlabel("updates")
    left.set_ylim(0, 32)
    left.set_title("steps that an input takes (parity of 6 signs)", loc="left", fontsize=10)
    left.legend(fontsize=8.5, frameon=False, loc="upper left")
    model = act.Pondering(6, 32)

    def inputs(T: int) -> Tensor:
        return act.make_parities(T, 32, 6, torch.Generator().manual_seed(0))[0]

    ways: Ways = {
        "as a plain loop": lambda T: partial(lambda xs: model.plain(xs)[0].sum(), inputs(T)),
        "8 checkpoints": lambda T: partial(lambda xs: model(xs, checkpoints=8)[0].sum(), inputs(T)),
    }
    bytes_over(right, (16, 32, 64, 128), ways, "inputs, each with steps of its own")


def draw_kalman(left: Axes, right: Axes) -> None:
    torch.manual_seed(0)
    states, ys = kalman.make_series(80, 32, torch.Generator().manual_seed(2))
    model = kalman.Kalman(torch.tensor([[0.9, 0.1], [-0.1, 0.9]]), torch.tensor([[1.0, 0.0]]))
    print("-log p:", kalman.train(model, ys, 300, compile=True, checkpoints=8)[-1])
    with torch.no_grad():
        _, means, variances = model(ys)
        scale = model.observation[0, 0]
        place, apart = scale * means[:, 0, 0], 2 * scale.abs() * variances[:, 0, 0].sqrt()
    time = torch.arange(len(ys))
    left.fill_between(time, place - apart, place + apart, color=BLUE, alpha=0.2, linewidth=0)
    left.plot(time, place, color=BLUE, label="believed, and twice the deviation")
    left.plot(time, states[:, 0, 0], color="black", linewidth=1, linestyle="--", label="true")
    left.plot(time, ys[:, 0, 0], ".", color=ORANGE, markersize=5, label="observed")
    left.set_ylim(-2.6, 3.6)
    left.legend(fontsize=8.5, frameon=False, loc="upper left", ncols=3, columnspacing=1, handletextpad=0.4)
    left.set_title("a trained filter follows a pendulum", loc="left", fontsize=10)

    def series(T: int) -> Tensor:
        return kalman.make_series(T, 32, torch.Generator().manual_seed(0))[1]

    ways: Ways = {
        "as a plain loop": lambda T: partial(lambda ys: model.plain(ys).sum(), series(T)),
        "16 checkpoints": lambda T: partial(lambda ys: model(ys, checkpoints=16)[0].sum(), series(T)),
    }
    bytes_over(right, (64, 128, 256, 512), ways, "times")


def draw_rnnt(left: Axes, right: Axes) -> None:
    torch.manual_seed(0)
    model = rnnt.Transducer(5, 6, 32)
    rnnt.train(model, 200)
    batch = rnnt.make_utterances(256, 6, 5, torch.Generator().manual_seed(9))
    print(f"edits per label: {rnnt.wrong(model, batch):.3f}")
    one = next(b for b in range(256) if batch.lens[b] == 5)
    frames, labels = batch.frames[one], batch.labels[one, :5]
    rows, alpha = [], torch.tensor([[0.0] + [rnnt.NEVER] * 5])
    with torch.no_grad():
        guesses = model.predict(labels[None])
        for frame in model.encode(frames):
            alpha = rnnt.frame_of_lattice(alpha, model.joint(frame, guesses), labels[None])
            rows.append(alpha[0].exp())
    left.imshow(torch.stack(rows).T, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
    left.set_xlabel("frames")
    left.set_xticks(range(0, len(rows), 5))
    left.set_yticks(range(6))
    left.set_title("probability to have said so many of 5 labels", loc="left", fontsize=10)
    wide = rnnt.Transducer(5, 256, 32)

    def utterances(T: int) -> tuple[tl.PackedTensor, Tensor, Tensor]:
        frames = torch.randn(8, T, 5, generator=torch.Generator().manual_seed(0))
        return tl.pack_padded(frames, [T] * 8), torch.ones(8, 10, dtype=torch.int64), torch.full((8,), 10)

    ways: Ways = {
        "the whole lattice": lambda T: partial(
            lambda b: wide.plain_loss(b[0].pad(), b[0].lens, *b[1:]).sum(), utterances(T)
        ),
        "8 checkpoints": lambda T: partial(lambda b: wide.loss(*b, checkpoints=8).sum(), utterances(T)),
    }
    bytes_over(right, (16, 32, 64, 128), ways, "frames (10 labels of 256)")


def draw_self_forcing(left: Axes, right: Axes) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, frames = self_forcing.Video(), 10

    def teach() -> Tensor:
        return self_forcing.denoising_loss(model, self_forcing.real_videos(frames, 64, generator), generator)

    def force() -> Tensor:
        videos = self_forcing.make_videos(model, self_forcing.draw_noise(2 * frames, 32, generator))
        return self_forcing.energy_distance(videos, self_forcing.real_videos(frames, 64, generator))

    for name, loss, updates, rate, (colour, marker, line) in (
        ("trained on 10 real frames", teach, 250, 2e-3, STYLES[0]),
        ("then 160 updates on 20 of its own", force, 160, 1e-3, STYLES[1]),
    ):
        self_forcing.train(model, loss, updates, rate)
        with torch.no_grad():
            fixed = self_forcing.draw_noise(3 * frames, 256, torch.Generator().manual_seed(1))
            off = self_forcing.off_the_square(self_forcing.make_videos(model, fixed))
        print(f"{name}: {', '.join(f'{x:.2f}' for x in off.tolist())}")
        left.plot(range(1, 3 * frames + 1), off, color=colour, marker=marker, markersize=3, linestyle=line, label=name)
    left.set_xlabel("frames")
    left.set_ylim(0, 2)
    left.set_title("how far points are from corners of a square", loc="left", fontsize=10)
    left.legend(fontsize=8.5, frameon=False, loc="upper right")

    def noise(F: int) -> Tensor:
        return self_forcing.draw_noise(F, 8, torch.Generator().manual_seed(0))

    ways: Ways = {
        "a loop with DynamicCache": lambda F: partial(lambda x: self_forcing.plain_videos(model, x).sum(), noise(F)),
        "TrainCache": lambda F: partial(lambda x: self_forcing.make_videos(model, x).sum(), noise(F)),
        "TrainCache, 4 checkpoints": lambda F: partial(
            lambda x: self_forcing.make_videos(model, x, checkpoints=4).sum(), noise(F)
        ),
    }
    bytes_over(right, (4, 8, 16, 32, 64), ways, "frames of 4 tokens, 4 steps each")


PICTURES = {
    "ode": draw_ode, "diffusion": draw_diffusion, "act": draw_act, "kalman": draw_kalman, "rnnt": draw_rnnt,
    "self_forcing": draw_self_forcing,
}  # fmt: skip


def main(names: Sequence[str]) -> None:
    for name in names or PICTURES:
        print(f"{name}:")
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        PICTURES[name](left, right)
        figure.savefig(FOLDER / f"recipe_{name}.png", dpi=100)
        pyplot.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
