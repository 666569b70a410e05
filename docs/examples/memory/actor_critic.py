"""An actor-critic rollout: a policy that attends to all it has seen stacks its history at every step.

Each stack is a new copy of everything so far, and attention keeps every one for backward: O(T²) bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import tensorloop as tl

B, D, ACTIONS = 2, 32, 3  # rollouts at a time, features, actions

torch.manual_seed(0)
see, ask, actor, critic = nn.Linear(2, D), nn.Linear(D, D), nn.Linear(D, ACTIONS), nn.Linear(D, 1)


def environment(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A point (B, 2) that is pushed left, not at all or right, and is paid for staying near 0."""
    speed = state[:, 1] + 0.1 * (action - 1) - 0.02 * state[:, 0]
    state = torch.stack([state[:, 0] + 0.1 * speed, speed], dim=1)
    return state, -state[:, 0].square()


def before(T: int) -> Tensor:
    torch.manual_seed(0)
    state, features, steps = torch.ones(B, 2), [], []
    for _ in range(T):
        feature = see(state).tanh()  # (B, D)
        features.append(feature[:, None])  # one head
        history = torch.stack(features, dim=2)  # (B, 1, t, D)
        seen = F.scaled_dot_product_attention(ask(feature)[:, None, None], history, history)[:, 0, 0]
        policy = Categorical(logits=actor(seen))
        action = policy.sample()
        state, reward = environment(state, action)
        steps.append((policy.log_prob(action), critic(seen)[:, 0], reward))
    return objective(steps)


def after(T: int) -> Tensor:
    torch.manual_seed(0)
    state, history, steps = torch.ones(B, 2), tl.TensorArray(), []
    for _ in range(T):
        feature = see(state).tanh()  # (B, D)
        history.append(feature[:, None])  # elements (B, 1, D): one head
        seen = tl.attention(ask(feature)[:, None], history, history)[:, 0]
        policy = Categorical(logits=actor(seen))
        action = policy.sample()
        state, reward = environment(state, action)
        steps.append((policy.log_prob(action), critic(seen)[:, 0], reward))
    return objective(steps)


def objective(steps: list[tuple[Tensor, Tensor, Tensor]], discount: float = 0.98) -> Tensor:
    """Actor and critic together, with the discounted return of each step."""
    log_probs, values, rewards = (torch.stack(column) for column in zip(*steps, strict=True))
    returns, total = [], torch.zeros(B)
    for reward in rewards.flip(0):
        total = reward + discount * total
        returns.append(total)
    advantage = torch.stack(returns).flip(0) - values
    return (advantage.square() - advantage.detach() * log_probs).mean()
