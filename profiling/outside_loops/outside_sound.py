"""Sound: torchaudio without its compiled extension, torchlpc, torchcomp."""

from functools import partial

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl

NUMBA = "the original is compiled by numba, with a gradient by hand"
SOUND = "torchaudio.functional.filtering."


def signal(size: Size) -> Tensor:
    """Sounds (B, T), as many values as a sequence of the other loops has."""
    return 0.5 * torch.randn(size.rows, 8 * size.steps)


def lfilter(size: Size) -> Made:
    """A filter of order 4, its loop over windows of the output in place."""
    waves = signal(size)
    a, b = torch.tensor([1.0, -0.5, 0.2, -0.1, 0.05]), torch.tensor([0.3, 0.2, 0.1, 0.05, 0.02])
    original = find("torchaudio.functional.lfilter")

    def port(waves: Tensor, a: Tensor, b: Tensor, compile: bool | None = None):
        order = len(a) - 1
        padded = torch.nn.functional.pad(waves, (order, 0))
        xs = torch.nn.functional.conv1d(padded[:, None], b.flip(0)[None, None])[:, 0] / a[0]
        weights = -a[1:] / a[0]

        def body(past, x):
            y = x + past @ weights
            return torch.cat([y[:, None], past[:, :-1]], 1), y

        return tl.scan(body, waves.new_zeros(len(waves), order), xs, dim=1, compile=compile)[1]

    return Made(lambda *xs: original(*xs, clamp=False), port, (waves, a, b))


def overdrive(size: Size) -> Made:
    waves = signal(size)
    original = find("torchaudio.functional.overdrive")

    def port(waves: Tensor, compile: bool | None = None):
        temp = waves * 10 + 0.1
        temp = torch.where(temp.abs() > 1, temp.sign() * 2 / 3, temp - temp**3 / 3)
        before = torch.nn.functional.pad(temp, (1, 0))[:, :-1]
        out = tl.linear_recurrence(0.995, temp - before, dim=1)
        return (waves * 0.5 + out * 0.75).clamp(-1, 1)

    return Made(lambda waves: original(waves, gain=20, colour=20), port, (waves,))


def phaser(size: Size) -> Made:
    """A buffer that is read at one place and written at another, both by the number of the step."""
    waves = signal(size)[None].squeeze(0)
    rate = 8000
    original = find("torchaudio.functional.phaser")
    table = find(SOUND + "_generate_wave_table")

    def port(waves: Tensor, compile: bool | None = None):
        length = int(3.0 * 0.001 * rate + 0.5)
        lag = table("SINE", "INT", int(rate / 0.5 + 0.5), 1.0, float(length), torch.pi / 2, waves.device)
        places = torch.arange(waves.shape[-1])
        reads = (places % length + lag[places % len(lag)]) % length

        def body(buffer, x):
            wave, read, write = x
            y = wave * 0.4 + buffer.index_select(1, read[None])[:, 0]
            return buffer.index_copy(1, write[None], (y * 0.4)[:, None]), y

        xs = waves.T, reads, (places + 1) % length
        ys = tl.scan(body, waves.new_zeros(len(waves), length), xs, compile=compile)[1]
        return (ys.T * 0.74).clamp(-1, 1)

    return Made(lambda waves: original(waves, rate, sinusoidal=True), port, (waves,))


def griffin_lim(size: Size) -> Made:
    n_fft, hop = 64, 16
    window = torch.hann_window(n_fft)
    spectrum = torch.rand(2, n_fft // 2 + 1, size.steps, requires_grad=True)
    original = find("torchaudio.functional.griffinlim")

    def port(spectrum: Tensor, compile: bool | None = None):
        magnitude, momentum = spectrum.sqrt(), 0.99 / 1.99

        def invert(angles):
            return torch.istft(magnitude * angles, n_fft, hop, n_fft, window)

        def body(i, carry):
            angles, before = carry
            rebuilt = torch.stft(invert(angles), n_fft, hop, n_fft, window, return_complex=True)
            angles = (rebuilt - before * momentum).contiguous()  # the spectrum lies frame by frame
            return angles / (angles.abs() + 1e-16), rebuilt.contiguous()

        start = torch.ones_like(magnitude) + 0j
        return invert(tl.fori_loop(0, 8, body, (start, torch.zeros_like(start)), compile=compile)[0])

    def run(spectrum: Tensor):
        return original(spectrum, window, n_fft, hop, n_fft, 2.0, 8, 0.99, None, False)

    return Made(run, port, (spectrum,))


def varying(order: int, size: Size) -> Made:
    """A filter whose coefficients change at each sample: compiled by numba there."""
    waves = signal(size).requires_grad_()
    a = (0.3 * torch.rand(*waves.shape, order) / order).requires_grad_()

    def port(waves: Tensor, a: Tensor, compile: bool | None = None):
        if order == 1:
            return tl.linear_recurrence(-a[..., 0], waves, dim=1)

        def body(past, x):
            wave, a = x
            y = wave - (a * past).sum(1)
            return torch.cat([y[:, None], past[:, :-1]], 1), y

        return tl.scan(body, waves.new_zeros(len(waves), order), (waves, a), dim=1, compile=compile)[1]

    return Made(find("torchlpc.sample_wise_lpc"), port, (waves, a))


def compressor(size: Size) -> Made:
    """The gain of a compressor, which rises and falls at two speeds: compiled by numba there."""
    gains = torch.rand(size.rows, 8 * size.steps, requires_grad=True)
    start, attack, release = (torch.rand(size.rows, requires_grad=True) for _ in range(3))
    original = find("torchcomp.core.CompressorFunction").apply

    def port(gains: Tensor, start: Tensor, attack: Tensor, release: Tensor, compile: bool | None = None):
        def body(g, x):
            rate = torch.where(x < g, attack, release)
            g = g * (1 - rate) + rate * x
            return g, g

        return tl.scan(body, start, gains, dim=1, compile=compile)[1]

    return Made(lambda *xs: original(*xs)[0], port, (gains, start, attack, release))


LOOPS = [
    Loop("torchaudio", "lfilter, order 4", lfilter, SOUND + "_lfilter_core_generic_loop"),
    Loop("torchaudio", "overdrive", overdrive, SOUND + "_overdrive_core_loop_generic", compiles=False),
    Loop("torchaudio", "phaser", phaser, SOUND + "phaser"),
    Loop("torchaudio", "Griffin-Lim", griffin_lim, "torchaudio.functional.functional.griffinlim"),
    Loop("torchlpc", "sample-wise filter, order 4", partial(varying, 4), "torchlpc.core.lpc_np", note=NUMBA),
    Loop("torchlpc", "sample-wise filter, order 1", partial(varying, 1), compiles=False, note=NUMBA),
    Loop("torchcomp", "compressor", compressor, "torchcomp.core.compressor_kernel", note=NUMBA),
]
