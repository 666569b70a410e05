"""Chains of states: CRFs, hidden Markov models, Kalman filters, splines."""

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl

TAGS = 12


def crf(size: Size):
    """A CRF, scores (T, B, tags), a mask of rows of unequal length."""
    net = find("torchcrf.CRF")(TAGS)
    scores = torch.randn(size.steps, size.rows, TAGS, requires_grad=True)
    lens = torch.linspace(size.steps // 2, size.steps, size.rows).long()
    return net, scores, torch.arange(size.steps)[:, None] < lens


def normalizer(size: Size) -> Made:
    net, scores, mask = crf(size)

    def port(scores: Tensor, mask: Tensor, compile: bool | None = None):
        def body(total, x):
            score, mask = x
            new = torch.logsumexp(total[:, :, None] + net.transitions, 1) + score
            return torch.where(mask[:, None], new, total), None

        start = net.start_transitions + scores[0]
        total, _ = tl.scan(body, start, (scores[1:], mask[1:]), compile=compile)
        return torch.logsumexp(total + net.end_transitions, 1)

    return Made(net._compute_normalizer, port, (scores, mask), list(net.parameters()))


def path_score(size: Size) -> Made:
    net, scores, mask = crf(size)
    tags = torch.randint(TAGS, mask.shape)

    def port(scores: Tensor, tags: Tensor, mask: Tensor, compile: bool | None = None):
        def body(total, x):
            score, before, tag, mask = x
            gained = net.transitions[before, tag] + score.gather(1, tag[:, None])[:, 0]
            return total + gained * mask, None

        start = net.start_transitions[tags[0]] + scores[0].gather(1, tags[0][:, None])[:, 0]
        xs = scores[1:], tags[:-1], tags[1:], mask[1:]
        total, _ = tl.scan(body, start, xs, compile=compile)
        return total + net.end_transitions[tags.gather(0, mask.sum(0, keepdim=True) - 1)[0]]

    return Made(net._compute_score, port, (scores, tags, mask), list(net.parameters()))


def viterbi(size: Size) -> Made:
    net, scores, mask = crf(size)
    scores.requires_grad_(False)
    net.requires_grad_(False)

    def port(scores: Tensor, mask: Tensor, compile: bool | None = None):
        def body(total, x):
            score, mask = x
            new, back = (total[:, :, None] + net.transitions + score[:, None]).max(1)
            keep = mask[:, None]
            return torch.where(keep, new, total), torch.where(keep, back, torch.arange(TAGS))

        def trace(tag, back):
            return back.gather(1, tag[:, None])[:, 0], tag

        start = net.start_transitions + scores[0]
        total, backs = tl.scan(body, start, (scores[1:], mask[1:]), compile=compile)
        first, tags = tl.scan(trace, (total + net.end_transitions).argmax(1), backs, reverse=True, compile=compile)
        return torch.cat([first[None], tags]).T[mask.T]

    def original(scores: Tensor, mask: Tensor):
        return torch.tensor([tag for row in net._viterbi_decode(scores, mask) for tag in row])

    return Made(original, port, (scores, mask))


def hmm(size: Size) -> Made:
    """The forward algorithm of a hidden Markov model, of log-probabilities of emissions."""
    states = TAGS
    normal = find("pomegranate.distributions.Normal")
    edges, starts = torch.rand(states, states).softmax(1), torch.rand(states).softmax(0)
    model = find("pomegranate.hmm.DenseHMM")(
        [normal([0.0], [1.0], covariance_type="diag") for _ in range(states)], edges=edges, starts=starts
    )
    model.edges.requires_grad_(True)
    scores = torch.randn(size.rows, size.steps, states, requires_grad=True)

    def port(scores: Tensor, compile: bool | None = None):
        high = model.edges.max()
        table = torch.exp(model.edges - high)

        def body(f, score):
            top = f.max(1, keepdim=True).values
            f = score + high + torch.log(torch.exp(f - top) @ table) + top
            return f, f

        start = scores[:, 0] + model.starts
        return torch.cat([start[:, None], tl.scan(body, start, scores[:, 1:], dim=1, compile=compile)[1]], 1)

    return Made(lambda scores: model.forward(emissions=scores), port, (scores,), [model.edges])


def filter_of(size: Size):
    """A Kalman filter of position and speed in each of two dims, and measures (T, B, 2, 1)."""
    move = torch.eye(4) + 0.1 * torch.eye(4).roll(2, 1).triu()
    model = find("torch_kf.KalmanFilter")(move, torch.eye(2, 4), 0.1 * torch.eye(4), torch.eye(2))
    state = find("torch_kf.GaussianState")(torch.zeros(size.rows, 4, 1), torch.eye(4).repeat(size.rows, 1, 1))
    return model, state, torch.randn(size.steps, size.rows, 2, 1, requires_grad=True)


def kalman(size: Size) -> Made:
    model, state, measures = filter_of(size)

    def original(measures: Tensor):
        found = model.filter(state, measures, update_first=False, return_all=True)
        return found.mean, found.covariance

    def port(measures: Tensor, compile: bool | None = None):
        def body(carry, measure):
            state = model.update(model.predict(find("torch_kf.GaussianState")(*carry)), measure)
            return (state.mean, state.covariance), (state.mean, state.covariance)

        return tl.scan(body, (state.mean, state.covariance), measures, compile=compile)[1]

    return Made(original, port, (measures,))


def smoother(size: Size) -> Made:
    model, state, measures = filter_of(size)
    found = model.filter(state, measures.detach(), update_first=False, return_all=True)
    means, covariances = found.mean.requires_grad_(), found.covariance
    gaussian = find("torch_kf.GaussianState")

    def original(means: Tensor, covariances: Tensor):
        with torch.no_grad():
            found = model.rts_smooth(gaussian(means, covariances))
        return found.mean, found.covariance

    @torch.no_grad()
    def port(means: Tensor, covariances: Tensor, compile: bool | None = None):
        move, noise = model.process_matrix, model.process_noise

        def body(after, now):
            mean, covariance = now
            moved = covariance @ move.mT
            predicted = move @ moved + noise
            gain = moved @ predicted.inverse()
            mean = mean + gain @ (after[0] - move @ mean)
            covariance = covariance + gain @ (after[1] - predicted) @ gain.mT
            return (mean, covariance), (mean, covariance)

        last = means[-1], covariances[-1]
        found = tl.scan(body, last, (means[:-1], covariances[:-1]), reverse=True, compile=compile)[1]
        return tuple(torch.cat([x, end[None]]) for x, end in zip(found, last, strict=True))

    return Made(original, port, (means, covariances))


def tridiagonal(size: Size) -> Made:
    """The solver of torchcde's splines."""
    original = find("torchcde.misc.tridiagonal_solve")
    b = torch.randn(size.rows, size.steps, requires_grad=True)
    upper, lower = (torch.rand(size.rows, size.steps - 1, requires_grad=True) for _ in range(2))
    diagonal = (3 + torch.rand(size.rows, size.steps)).requires_grad_()

    def port(b: Tensor, upper: Tensor, diagonal: Tensor, lower: Tensor, compile: bool | None = None):
        def down(before, x):
            b, upper, diagonal, lower = x
            w = lower / before[1]
            now = b - w * before[0], diagonal - w * upper
            return now, now

        def up(after, x):
            b, diagonal, upper = x
            y = (b - upper * after) / diagonal
            return y, y

        start = b[:, 0], diagonal[:, 0]
        last, (bs, diagonals) = tl.scan(down, start, (b[:, 1:], upper, diagonal[:, 1:], lower), dim=1, compile=compile)
        bs, diagonals = (torch.cat([s[:, None], x], 1) for s, x in zip(start, (bs, diagonals), strict=True))
        end = last[0] / last[1]
        ys = tl.scan(up, end, (bs[:, :-1], diagonals[:, :-1], upper), dim=1, reverse=True, compile=compile)[1]
        return torch.cat([ys, end[:, None]], 1)

    return Made(original, port, (b, upper, diagonal, lower))


KF = "torch_kf.KalmanFilter."
LOOPS = [
    Loop("pytorch-crf", "normalizer", normalizer, "torchcrf.CRF._compute_normalizer"),
    Loop("pytorch-crf", "score of a path", path_score, "torchcrf.CRF._compute_score"),
    Loop("pytorch-crf", "Viterbi decoding", viterbi, "torchcrf.CRF._viterbi_decode", others=(1,)),
    Loop("pomegranate", "DenseHMM, forward algorithm", hmm, "pomegranate.hmm.DenseHMM.forward"),
    Loop("torch-kf", "Kalman filter", kalman, KF + "filter", wraps=True),
    Loop("torch-kf", "Rauch-Tung-Striebel smoother", smoother, KF + "rts_smooth", others=(1, 11)),
    Loop("torchcde", "tridiagonal solve", tridiagonal, "torchcde.misc.tridiagonal_solve", others=()),
]
