"""What trainers of language models run, beside padded rows and `generate`; in turns, in one process."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import tensorloop as tl
from tensorloop import hf, memory
from tensorloop.hf.signature import signature_of

MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOY: dict[str, Any] = MODEL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
PROMPTS, GROUP, PROMPT = 2, 8, 256
HEAD_TOKENS, HEAD_WIDTH, HEAD_WORDS = 4000, 512, 32000
LONG, PIECE, WINDOW, SINKS = 100_000, 500, 256, 4


def llama(sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.set_attn_implementation(hf.ATTENTION)
    return model


def in_turns(runs: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Medians of seconds of each, and of the ratios of each to the first."""
    spent: list[dict[str, float]] = []
    for _ in range(turns + 1):
        times: dict[str, float] = {}
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name] = time.perf_counter() - start
        spent.append(times)
    first = next(iter(runs))
    found = {f"s, {name}": statistics.median(x[name] for x in spent[1:]) for name in runs}
    return found | {f"ratio, {name}": statistics.median(x[name] / x[first] for x in spent[1:]) for name in runs}


def score_group(completion: int, turns: int = 5) -> dict[str, float]:
    """Log-probabilities of 8 completions to a prompt, forward and backward: padded rows, and the prompt once."""
    model = llama(MODEL)
    prompts = torch.randint(3, 512, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    said = torch.randint(3, 512, (PROMPTS * GROUP, completion), generator=torch.Generator().manual_seed(1))
    packed = [tl.PackedTensor(x.flatten(), [x.shape[1]] * len(x)) for x in (prompts, said)]

    def padded() -> Tensor:
        ids = torch.cat([prompts.repeat_interleave(GROUP, 0), said], 1)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=completion + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, said[..., None]).mean()

    def once() -> Tensor:
        return hf.completion_logprobs(model, packed[0], packed[1], group=GROUP).values.mean()

    torch.testing.assert_close(once(), padded(), rtol=1e-4, atol=1e-4)
    runs = {"padded": padded, "prompt once": once}
    held = {f"bytes, {name}": float(memory.saved_bytes(run)) for name, run in runs.items()}
    return held | in_turns({name: lambda run=run: run().backward() for name, run in runs.items()}, turns)


def roll_group(completion: int, turns: int = 5) -> dict[str, float]:
    """A rollout with gradients of 8 continuations of a prompt: prompts repeated, and run once."""
    model = llama(MODEL)
    prompts = torch.randint(3, 512, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    given: Any = {"max_new_tokens": completion, "eos_token_id": [], "do_sample": True}

    def repeated() -> Tensor:
        return hf.rollout(model, prompts.repeat_interleave(GROUP, 0), **given).log_probs.values.mean()

    def once() -> Tensor:
        return hf.rollout(model, prompts, group=GROUP, **given).log_probs.values.mean()

    runs = {"repeated": repeated, "prompt once": once}
    held = {f"bytes, {name}": float(memory.saved_bytes(run)) for name, run in runs.items()}
    return held | in_turns({name: lambda run=run: run().backward() for name, run in runs.items()}, turns)


def score_vocabulary(turns: int = 1) -> dict[str, float]:
    """Log-probabilities and entropies of 4,000 tokens among 32,000, forward and backward: (N, V), and 512 rows."""
    torch.manual_seed(0)
    head = torch.nn.Linear(HEAD_WIDTH, HEAD_WORDS, bias=False)
    hidden = torch.randn(HEAD_TOKENS, HEAD_WIDTH, requires_grad=True)
    tokens = torch.randint(HEAD_WORDS, (HEAD_TOKENS,))

    def whole() -> None:
        scores = head(hidden).log_softmax(-1)
        entropy = -(scores.exp() * scores).sum(-1)
        (scores.gather(1, tokens[:, None]).mean() + entropy.mean()).backward()

    def chunks() -> None:
        log_probs, entropy = hf.token_logprobs(head, hidden, tokens, return_entropy=True)
        (log_probs.mean() + entropy.mean()).backward()

    runs = {"whole": whole, "512 rows": chunks}
    held: dict[str, float] = {}
    for name, run in runs.items():
        head.weight.grad = hidden.grad = None
        with memory.track() as tracker:
            run()
        held[f"peak, {name}"] = float(tracker.peak)
    return held | in_turns(runs, turns)


def grpo(turns: int = 9) -> dict[str, float]:
    """A toy GRPO step: 3 prompts of 8, groups of 8, 12 tokens, two updates; beside generate and padded passes."""
    prompts = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    packed = tl.PackedTensor(prompts.flatten(), [8] * 3)

    def update(optimizer: Any, new: Tensor, old: Tensor, gains: Tensor) -> None:
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def reward(tokens: Tensor) -> Tensor:
        scores = (tokens % 2).float().mean(1).view(3, GROUP)
        return ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten()

    theirs, ours = llama(TOY), llama(TOY)
    theirs.set_attn_implementation("sdpa")
    steps = {id(model): torch.optim.AdamW(model.parameters(), 1e-4) for model in (theirs, ours)}

    def padded() -> None:
        rows = prompts.repeat_interleave(GROUP, 0)
        with torch.no_grad():
            ids = theirs.generate(rows, max_new_tokens=12, do_sample=True, eos_token_id=None, pad_token_id=0)
        said = ids[:, 8:]

        def log_probs() -> Tensor:
            logits = theirs(input_ids=ids, use_cache=False, logits_to_keep=13).logits[:, :-1]
            return logits.log_softmax(-1).gather(2, said[..., None])[..., 0]

        with torch.no_grad():
            old = log_probs()
        gains = reward(said)[:, None]
        for _ in range(2):
            update(steps[id(theirs)], log_probs(), old, gains)

    def packs() -> None:
        with torch.no_grad():
            drawn = hf.rollout(ours, prompts, group=GROUP, max_new_tokens=12, do_sample=True, eos_token_id=[])
        gains = reward(drawn.tokens.pad(0))[drawn.tokens.row_ids]
        old = drawn.policy_log_probs.values
        for _ in range(2):
            new = hf.completion_logprobs(ours, packed, drawn.tokens, group=GROUP).values
            update(steps[id(ours)], new, old, gains)

    return in_turns({"generate, padded": padded, "rollout, packed": packs}, turns)


def roll_long(tokens: int = LONG) -> dict[str, float]:
    """A training rollout in pieces of 500 tokens through a rolling window; bytes of a piece, early and last."""
    model = llama(TOY | {"max_position_embeddings": tokens + 1})
    called = str(signature_of(model).cache)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    cache: Any = hf.TrainCache(model.config, window=WINDOW, sinks=SINKS)
    last, peaks = torch.full((1, 1), 3), {}
    generator = torch.Generator().manual_seed(0)
    begun = time.perf_counter()

    def piece(cache: Any, last: Tensor) -> tuple[Any, Tensor]:
        total = torch.zeros(())
        for _ in range(PIECE):
            logits = model(last, **{called: cache}, use_cache=True).logits[:, -1]
            last = logits.detach().softmax(-1).multinomial(1, generator=generator)
            reward = 1.0 if int(last) % 2 else -1.0
            total = total - reward * F.log_softmax(logits, -1).gather(1, last)[0, 0]
        optimizer.zero_grad()
        (total / PIECE).backward()
        optimizer.step()
        return cache.detach(), last

    for i in range(tokens // PIECE):
        if i in (2, tokens // PIECE - 1):
            with memory.track() as tracker:
                cache, last = piece(cache, last)
            peaks[i] = float(tracker.peak)
        else:
            cache, last = piece(cache, last)
    first, *_, end = peaks.values()
    return {
        "tokens": float(cache.get_seq_length()), "early": first, "last": end, "seconds": time.perf_counter() - begun
    }  # fmt: skip
