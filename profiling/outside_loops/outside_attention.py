"""Decoders that attend at each step: torchaudio's Tacotron2, SpeechBrain's attentional decoder."""

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl


def tacotron(size: Size) -> Made:
    """Teacher forced, as in training."""
    net = find("torchaudio.models.tacotron2._Decoder")(
        n_mels=8, n_frames_per_step=1, encoder_embedding_dim=size.width, decoder_rnn_dim=size.width,
        decoder_max_step=100, decoder_dropout=0.0, decoder_early_stopping=False, attention_rnn_dim=size.width,
        attention_hidden_dim=size.width, attention_location_n_filter=4, attention_location_kernel_size=5,
        attention_dropout=0.0, prenet_dim=size.width, gate_threshold=0.5,
    )  # fmt: skip
    net.eval()
    memory = torch.randn(size.rows, 2 * size.steps // 3, size.width, requires_grad=True)
    frames = torch.randn(size.rows, 8, size.steps, requires_grad=True)
    lens = torch.full((size.rows,), memory.shape[1])
    net.prenet = net.prenet.layers[0]  # without its dropout, which is on in evaluation too

    def port(memory: Tensor, frames: Tensor, lens: Tensor, compile: bool | None = None):
        inputs = torch.cat([net._get_initial_frame(memory)[None], net._parse_decoder_inputs(frames)])
        inputs = net.prenet(inputs)[:-1]
        mask = find("torchaudio.models.tacotron2._get_mask_from_lengths")(lens)
        *init, processed = net._initialize_decoder_states(memory)

        def body(state, x):
            mel, gate, *state = net.decode(x, *state, memory, processed, mask)
            return tuple(state), (mel, gate[:, 0], state[4])

        return net._parse_decoder_outputs(*tl.scan(body, tuple(init), inputs, compile=compile)[1])

    return Made(net, port, (memory, frames, lens), list(net.parameters()))


def attentional(size: Size) -> Made:
    """The attention keeps what it computes of the encoder in its first step; its last weights, where it uses them."""
    net = find("speechbrain.nnet.RNN.AttentionalRNNDecoder")(
        "gru", "location", size.width, size.width, 1, size.width, size.width, channels=4, kernel_size=5
    )
    xs = torch.randn(size.rows, size.steps, size.width, requires_grad=True)
    states = torch.randn(size.rows, 2 * size.steps // 3, size.width, requires_grad=True)
    lens = torch.ones(size.rows)

    def port(xs: Tensor, states: Tensor, lens: Tensor, compile: bool | None = None):
        net.attn.reset()
        counts = torch.round(states.shape[1] * lens).long()

        def body(carry, x):
            y, h, c, w = net.forward_step(x, *carry, states, counts)
            return (h, c), (y, w)

        init = tl.first_only((None, xs.new_zeros(len(xs), net.attn_dim)))
        return tl.carrying(net.attn).scan(body, init, xs, dim=1, compile=compile)[1]

    return Made(net, port, (xs, states, lens), list(net.parameters()))


LOOPS = [
    Loop("torchaudio", "Tacotron2's decoder", tacotron, "torchaudio.models.tacotron2._Decoder.forward", wraps=True),
    Loop(
        "speechbrain",
        "AttentionalRNNDecoder",
        attentional,
        "speechbrain.nnet.RNN.AttentionalRNNDecoder.forward",
        wraps=True,
        double=False,
        at_most=1e-4,
    ),
]
