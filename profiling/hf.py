"""Models of transformers in loops: decoding with gradients beside DynamicCache, searches, rows without padding.

    python profiling/hf.py             # some 10 minutes
    python profiling/hf.py --short     # one model, two lengths
    python profiling/hf.py --only turns search    # some kinds of cells; the others stay

Models have four layers of width 128 and 4 heads; four rows, float32. Bytes are those alive after forward that were
made in it, weights left out. A time is one whole run, forward and backward, or forward alone without gradients, in
turns with a DynamicCache's in one process; a ratio is the median of the turns' ratios. "Small Llama" has two layers of
width 64, where what Python does a step shows most. `eager`, `sdpa` and
`tensorloop` are attention implementations; `+ layers` and `+ steps` are checkpointed layers (`hf.checkpoint_layers`)
and steps (`tl.scan(checkpoints=16)`). Searches stand beside `generate`, packed calls beside padded ones, in turns
as well.
"""

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import plots, sentences
from running import harness
from running.script import Result, Script, Target
from whole_models import hf_packed, hf_search

MIB = 2**20
MODELS = ("GPT-2", "Llama", "grouped heads")
MORE = ("T5", "GPT-2, dropout 0.1", "Llama, padded")
SMALL = "small Llama"
WAYS = ("DynamicCache", "sdpa", "tensorloop")
CHECKPOINTED = ("tensorloop + layers", "tensorloop + steps")
LENGTHS = {"quick": (4,), "short": (64, 128), "usual": (32, 64, 128, 256)}
PROMPTS = {"quick": (4,), "short": (8,), "usual": (8, 128, 512)}
SEARCHED = ("gpt2", "llama", "bart")
PACKED = ("gpt2", "llama", "gpt2, dropout")
BOUNDS = {"GPT-2": 8, "Llama": 13, "grouped heads": 8}
ROUNDS_OF_DRAFTS = 64
KINDS = ("decode", "turns", "crop", "search", "packed")
TURNS = {"quick": 1, "short": 5, "usual": 9}


def cells(args: Namespace) -> list[harness.Cell]:
    lengths = LENGTHS[args.set]
    few = args.set != "usual"
    models = MODELS[1:2] if few else (*MODELS, *MORE)
    found: list[harness.Cell] = []
    for model in models:
        ways = (*WAYS, *CHECKPOINTED) if model in MODELS else (WAYS[0], WAYS[2])
        found += [{"kind": "decode", "model": model, "way": way, "steps": n} for n in lengths for way in ways]
        twice = model in MODELS and args.set != "quick"
        steps = (lengths[-1], 2 * lengths[-1]) if twice else lengths[-1:]
        found += [{"kind": "turns", "model": model, "steps": n, "turns": TURNS[args.set]} for n in steps]
    found.append({"kind": "turns", "model": SMALL, "steps": lengths[-1] // 2, "turns": TURNS[args.set]})
    drafts, steps = {"quick": (2, 3), "short": (16, 64), "usual": (ROUNDS_OF_DRAFTS, 64)}[args.set]
    found += [{"kind": "crop", "way": way, "rounds": drafts} for way in WAYS]
    searched, packed = (SEARCHED[:1], PACKED[:1]) if few else (SEARCHED, PACKED)
    found += [
        {"kind": "search", "model": model, "prompt": n, "steps": steps} for model in searched for n in PROMPTS[args.set]
    ]
    found += [{"kind": "packed", "model": model} for model in packed if args.set != "quick"]
    return [cell for cell in found if args.only is None or cell["kind"] in args.only]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=KINDS, help="kinds of cells to measure anew; the rest stays")


def model_of(name: str) -> Any:
    import torch
    import transformers

    sizes: Any = {
        "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "T5":
        config: Any = transformers.T5Config(
            vocab_size=1000, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_heads=4, dropout_rate=0.0
        )
        return transformers.T5ForConditionalGeneration(config).train()
    if name.startswith("GPT-2"):
        drop = 0.1 if "dropout" in name else 0.0
        config = transformers.GPT2Config(
            vocab_size=1000, n_embd=128, n_layer=4, n_head=4, n_positions=1024, attn_pdrop=drop, resid_pdrop=0.0,
            embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    else:
        heads = 2 if name == "grouped heads" else 4
        few = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2} if name == SMALL else {}
        config = transformers.LlamaConfig(**sizes | few, num_key_value_heads=heads)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def decoding(cell: harness.Cell) -> Callable[[], Any]:
    """What decodes the steps and gives the loss."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache

    import tensorloop as tl
    from tensorloop import hf
    from tensorloop.hf.signature import signature_of

    model, way, steps = model_of(cell["model"]), cell["way"], cell["steps"]
    called = str(signature_of(model).cache)
    model.set_attn_implementation("sdpa" if way in WAYS[:2] else "tensorloop")
    if way.endswith("layers"):
        hf.checkpoint_layers(model)
    ids = torch.randint(3, 1000, (4, steps), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if "padded" in cell["model"]:
        mask[0, : steps // 4] = mask[1, : steps // 8] = 0

    def new() -> Any:
        return DynamicCache(config=model.config) if way == WAYS[0] else hf.TrainCache(model.config, capacity=steps)

    def run() -> Any:
        cache, out = new(), []
        if cell["model"] == "T5":
            states = model.get_encoder()(input_ids=ids[:, :8])
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
            for t in range(steps):
                given = {"encoder_outputs": states, called: cache, "use_cache": True}
                out.append(model(decoder_input_ids=ids[:, t : t + 1], **given).logits.square().mean())
        elif way.endswith("steps"):

            def body(cache: Any, token: Any) -> Any:
                states = model.base_model(token[:, None], **{called: cache}, use_cache=True).last_hidden_state
                return cache, states.square().mean()

            return tl.scan(body, cache, ids.T, checkpoints=16)[1].sum()
        else:
            padded = "padded" in cell["model"]
            for t in range(steps):
                given = {"attention_mask": mask[:, : t + 1]} if padded else {}
                states = model.base_model(ids[:, t : t + 1], **{called: cache}, use_cache=True, **given)
                out.append(states.last_hidden_state.square().mean())
        return torch.stack(out).sum()

    return run


def drafting(cell: harness.Cell) -> Callable[[], Any]:
    """Rounds of three draft tokens, of which two are taken back; float64."""
    import torch
    from transformers import DynamicCache

    from tensorloop import hf
    from tensorloop.hf.signature import signature_of

    model = model_of("Llama").double()
    called = str(signature_of(model).cache)
    model.set_attn_implementation("tensorloop" if cell["way"] == WAYS[2] else "sdpa")
    ids = torch.randint(3, 1000, (4, 3 * cell["rounds"]), generator=torch.Generator().manual_seed(0))

    def run() -> Any:
        ours = cell["way"] != WAYS[0]
        cache: Any = hf.TrainCache(model.config) if ours else DynamicCache(config=model.config)
        out = []
        for i in range(cell["rounds"]):
            drafts = ids[:, 3 * i : 3 * i + 3]
            states = model.base_model(drafts, **{called: cache}, use_cache=True).last_hidden_state
            out.append(states.square().mean())
            cache.crop(-2)
        return torch.stack(out).sum()

    return run


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """Bytes held after forward; of drafts also seconds of a run with its backward, the best of three."""
    from tensorloop import memory

    if cell["kind"] == "search":
        return hf_search.time_search(cell["model"], cell["prompt"], cell["steps"])
    if cell["kind"] == "packed":
        return hf_packed.time_padding(cell["model"])
    if cell["kind"] == "turns":
        return in_turns(cell)
    if cell["kind"] == "decode":
        return {"bytes": memory.saved_bytes(decoding(cell))}
    run = drafting(cell)
    return {"bytes": memory.saved_bytes(run), "seconds": _fastest(lambda: run().backward())}


def in_turns(cell: harness.Cell) -> dict[str, Any]:
    """Ours : DynamicCache, medians of turns: a run with its backward, and one without gradients."""
    import torch

    theirs, ours = (decoding({**cell, "way": way}) for way in (WAYS[0], WAYS[2]))
    trained = tuple(lambda run=run: run().backward() for run in (theirs, ours))
    found: dict[str, Any] = {}
    for name, runs in {"seconds": trained, "inference_s": tuple(map(torch.no_grad(), (theirs, ours)))}.items():
        spent = [[_seconds(run) for run in runs] for _ in range(cell["turns"] + 1)][1:]
        found |= {f"{name} {way}": statistics.median(x[i] for x in spent) for i, way in enumerate((WAYS[0], WAYS[2]))}
        found[f"{name} ratio"] = statistics.median(b / a for a, b in spent)
    return found


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _fastest(run: Callable[[], Any]) -> float:
    return min(_seconds(run) for _ in range(3))


def _value(result: Result, key: str, **cell: Any) -> float | None:
    return harness.figure(result, key, **cell)


def lengths_of(result: Result) -> list[int]:
    return sorted({entry["cell"]["steps"] for entry in result["entries"] if entry["cell"]["kind"] == "decode"})


def targets(result: Result) -> list[Target]:
    longest, found = max(lengths_of(result)), []

    def ratio(key: str, model: str, way: str, under: str) -> float | None:
        a, b = (_value(result, key, model=model, way=w, steps=longest) for w in (under, way))
        return None if a is None or b is None else a / b

    for model, bound in BOUNDS.items():
        what = f"{model}, {longest} steps: bytes, DynamicCache : "
        found.append(Target(f"{what}ours", ratio("bytes", model, WAYS[2], WAYS[0]), bound, least=True))
        for way in CHECKPOINTED:
            found.append(Target(f"{what}{way}", ratio("bytes", model, way, WAYS[0]), 20, least=True))
        turns = {"kind": "turns", "model": model, "steps": longest}
        graded, ungraded = (_value(result, f"{key} ratio", **turns) for key in ("seconds", "inference_s"))
        found.append(Target(f"{model}, {longest} steps: seconds, ours : DynamicCache", graded, 0.8))
        found.append(Target(f"{model}, {longest} steps without gradients: seconds, ours : DynamicCache", ungraded, 1.0))
    ours, theirs = (_value(result, "bytes", kind="crop", way=w) for w in (WAYS[2], WAYS[0]))
    both = None if ours is None or theirs is None else ours / theirs
    found.append(Target("draft three, take back two: bytes, ours : DynamicCache", both, 1.0))
    for cell in cells_of(result, "search"):
        what = f"search, {cell['model']} after {cell['prompt']} tokens: times as fast as generate"
        found.append(Target(what, _value(result, "ratio", **cell), 1.6, least=True))
    for cell in cells_of(result, "packed"):
        what = f"half padding, {cell['model']}: seconds, packed : padded"
        found.append(Target(what, _value(result, "ratio", **cell), 0.6))
    return found


def cells_of(result: Result, kind: str) -> list[harness.Cell]:
    return [entry["cell"] for entry in result["entries"] if entry["cell"]["kind"] == kind]


def section(result: Result, picture: str) -> str:
    lengths, rows = lengths_of(result), []
    for model in (*MODELS, *MORE):
        for way in (*WAYS, *CHECKPOINTED):
            found = [_value(result, "bytes", kind="decode", model=model, way=way, steps=n) for n in lengths]
            if any(x is not None for x in found):
                rows.append([model, way, *("-" if x is None else harness.digits(x / MIB) for x in found)])
    held = harness.table(["MiB", "", *(f"T = {n}" for n in lengths)], rows)
    crops = [[way, *(_crop(result, way))] for way in WAYS]
    drafts = harness.table(["draft three, take back two", "MiB", "s"], crops)
    return "\n\n".join([held, _turns(result), drafts, f"![Bytes held by the number of steps]({picture})"])


def summary(result: Result) -> list[str]:
    """Bytes beside DynamicCache, and where transformers' own ways are faster."""
    text, ratios = [], {}
    longest = max(lengths_of(result))
    held = [_value(result, "bytes", kind="decode", model="GPT-2", way=way, steps=longest) for way in (WAYS[2], WAYS[0])]
    if held[0] and held[1]:
        ours, theirs = (harness.digits(x / MIB, "MiB") for x in held if x)
        text.append(
            f"Decoding {longest} tokens of GPT-2 with gradients keeps {sentences.share(held[0] / held[1])} of the "
            f"bytes of `DynamicCache`: {ours} for {theirs}."
        )
    for cell in cells_of(result, "turns"):
        what = f"{cell['model']}, {cell['steps']} steps"
        ratios[f"`DynamicCache`, {what}"] = _value(result, "seconds ratio", **cell)
        ratios[f"`DynamicCache`, {what} without gradients"] = _value(result, "inference_s ratio", **cell)
    for cell in cells_of(result, "search"):
        speed = _value(result, "ratio", **cell)
        ratios[f"`generate`, {cell['model']} after {cell['prompt']} tokens"] = 1 / speed if speed else None
    for cell in cells_of(result, "packed"):
        ratios[f"padded rows, {cell['model']}"] = _value(result, "ratio", **cell)
    return [*text, *sentences.winners(ratios)]


def _turns(result: Result) -> str:
    """Ours beside DynamicCache, a run of each in turn."""
    rows = []
    for cell in cells_of(result, "turns"):
        found = [
            _value(result, f"{key} {what}", **cell)
            for key in ("seconds", "inference_s")
            for what in (WAYS[0], WAYS[2], "ratio")
        ]
        shown = ["-" if x is None else harness.digits(x) for x in found]
        rows.append([cell["model"], str(cell["steps"]), *shown])
    names = ("DynamicCache", "tensorloop", "ratio")
    header = ["s, in turns", "T", *names, *(f"without gradients: {name}" for name in names)]
    return harness.table(header, rows, 1)


def _crop(result: Result, way: str) -> list[str]:
    held, spent = (_value(result, key, kind="crop", way=way) for key in ("bytes", "seconds"))
    return ["-" if held is None else harness.digits(held / MIB), "-" if spent is None else harness.digits(spent)]


def draw(result: Result, path: Path) -> None:
    """A panel for each model: MiB by the number of steps, a line for each way."""
    lengths = lengths_of(result)
    models = [m for m in MODELS if _value(result, "bytes", model=m, way=WAYS[0], steps=lengths[-1]) is not None]
    with plots.drawing(path, (4 * max(len(models), 1), 3.6)) as drawn:
        for place, model in enumerate(models):
            axes = drawn.add_subplot(1, len(models), place + 1)
            for number, way in enumerate((*WAYS, *CHECKPOINTED)):
                held = [_value(result, "bytes", model=model, way=way, steps=n) for n in lengths]
                shown = [(n, x / MIB) for n, x in zip(lengths, held, strict=True) if x is not None]
                colour = "#999999" if number == 0 else plots.COLOURS[number - 1]
                wide = way == "sdpa"  # it holds what "tensorloop" holds, which is drawn on top
                axes.plot(
                    *zip(*shown, strict=True),
                    marker=plots.MARKERS[number],
                    markersize=8 if wide else 5,
                    linewidth=4 if wide else 1.4,
                    label=way,
                    color=colour,
                )
            axes.set_title(model, fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.set_xlabel("steps")
            if not place:
                axes.set_ylabel("MiB held for backward")
                axes.legend(fontsize=7.5, frameon=False)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    targets=targets,
    draw=draw,
    options=options,
    group=lambda cell: cell["kind"],
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
