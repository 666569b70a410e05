"""Modules of ESPnet, built small, for the zoo."""

from typing import Any

from torch import nn
from zoo_modules.zoo_check import WIDTH, Batch, Edit, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, LONG, SHORT, find, made

ENCODER: dict[str, Any] = {
    "output_size": WIDTH,
    "attention_heads": HEADS,
    "num_blocks": 2,
    "dropout_rate": 0.0,
    "positional_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "input_layer": "linear",
}

_EMBEDDING = "espnet.nets.pytorch_backend.transformer.embedding.RelPositionalEncoding"
OF_THE_LONGEST = (
    Edit(
        f"{_EMBEDDING}.extend_pe",
        (("if self.pe.size(1) >= x.size(1) * 2 - 1:", "if self.pe.size(1) >= x.max_len * 2 - 1:"),),
    ),
    Edit(
        f"{_EMBEDDING}.forward",
        (
            (
                "self.pe.size(1) // 2 - x.size(1) + 1 : self.pe.size(1) // 2 + x.size(1),",
                "self.pe.size(1) // 2 - x.max_len + 1 : self.pe.size(1) // 2 + x.max_len,",
            ),
        ),
    ),
)
MEMORY_MASK = Edit(
    "espnet2.asr.decoder.transformer_decoder.BaseTransformerDecoder.forward",
    (
        (
            "memory_mask = (~make_pad_mask(hlens, maxlen=memory.size(1)))[:, None, :].to(",
            "memory_mask = (~make_pad_mask(hlens, maxlen=memory.max_len))[:, None, :].to(",
        ),
    ),
)


def channels_last_ecapa(module: Any, batch: Batch) -> Any:
    """(B, C, T*) as its pooling takes it, turned."""
    return module(batch.x).transpose(1, 2)


old, new = "espnet.nets.pytorch_backend", "espnet2"
package = "espnet"
block = {"linear_units": HIDDEN}
conformer = {**ENCODER, **block, "cnn_module_kernel": 3, "macaron_style": True}
mlp = {"cgmlp_linear_units": HIDDEN, "cgmlp_conv_kernel": 3}
absolute = {"pos_enc_layer_type": "abs_pos", "selfattention_layer_type": "selfattn"}


def attend(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.x, batch.x, (~batch.padding)[:, None])


def attend_to_all(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.x, batch.x, None)


def layer(module: Any, batch: Batch) -> Any:
    return module(batch.x, (~batch.padding)[:, None])[0]


def encode(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.lens)[0]


def make_layer() -> nn.Module:
    attention = find(f"{old}.transformer.attention.MultiHeadedAttention")(HEADS, WIDTH, 0.0)
    mlp = find(f"{old}.transformer.positionwise_feed_forward.PositionwiseFeedForward")(WIDTH, HIDDEN, 0.0)
    return find(f"{old}.transformer.encoder_layer.EncoderLayer")(WIDTH, attention, mlp, 0.0)


def decode(module: Any, batch: Batch) -> Any:
    ids = (batch.x[..., 0] * 4).long().abs() % 11
    return module(batch.x, batch.lens, ids, batch.lens)[0]


def relative() -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = find(f"{old}.transformer.embedding.RelPositionalEncoding")(WIDTH, 0.0)
            self.attention = find(f"{old}.transformer.attention.RelPositionMultiHeadedAttention")(HEADS, WIDTH, 0.0)

        def forward(self, x: Any) -> Any:
            x, places = self.places(x)
            return self.attention(x, x, x, places, None)

    return Attention()


subsampled = {"lens": LONG, "note": SHORT}
rows = f"{old}.transformer"
MODULES = [
    Module(
        package,
        "MultiHeadedAttention, padding mask",
        made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0),
        attend,
    ),
    Module(
        package,
        "MultiHeadedAttention by SDPA",
        made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0, use_sdpa=True),
        attend,
    ),
    Module(
        package,
        "MultiHeadedAttention, no mask",
        made(f"{rows}.attention.MultiHeadedAttention", HEADS, WIDTH, 0.0, qk_norm=True),
        attend_to_all,
    ),
    Module(package, "RelPositionMultiHeadedAttention", relative, edits=OF_THE_LONGEST),
    Module(package, "PositionalEncoding", made(f"{rows}.embedding.PositionalEncoding", WIDTH, 0.0)),
    Module(package, "ScaledPositionalEncoding", made(f"{rows}.embedding.ScaledPositionalEncoding", WIDTH, 0.0)),
    Module(package, "EncoderLayer", make_layer, layer),
    Module(
        package,
        "TransformerEncoder",
        made(f"{new}.asr.encoder.transformer_encoder.TransformerEncoder", WIDTH, **ENCODER, **block),
        encode,
    ),
    Module(
        package,
        "TransformerEncoder, Conv2dSubsampling",
        made(
            f"{new}.asr.encoder.transformer_encoder.TransformerEncoder",
            WIDTH,
            **{**ENCODER, "input_layer": "conv2d"},
            **block,
        ),
        encode,
        **subsampled,
    ),
    Module(
        package,
        "ConformerEncoder, absolute positions",
        made(f"{new}.asr.encoder.conformer_encoder.ConformerEncoder", WIDTH, **conformer, **absolute),
        encode,
        train=False,
    ),
    Module(
        package,
        "ConformerEncoder",
        made(f"{new}.asr.encoder.conformer_encoder.ConformerEncoder", WIDTH, **conformer, rel_pos_type="latest"),
        encode,
        train=False,
        edits=OF_THE_LONGEST,
    ),
    Module(package, "ConvolutionModule", made(f"{old}.conformer.convolution.ConvolutionModule", WIDTH, 3), train=False),
    Module(
        package,
        "BranchformerEncoder",
        made(f"{new}.asr.encoder.branchformer_encoder.BranchformerEncoder", WIDTH, **ENCODER, **mlp),
        encode,
        edits=OF_THE_LONGEST,
    ),
    Module(
        package,
        "BranchformerEncoder, absolute positions",
        made(
            f"{new}.asr.encoder.branchformer_encoder.BranchformerEncoder",
            WIDTH,
            **ENCODER,
            **mlp,
            pos_enc_layer_type="abs_pos",
            attention_layer_type="selfattn",
        ),
        encode,
    ),
    Module(
        package,
        "EBranchformerEncoder",
        made(f"{new}.asr.encoder.e_branchformer_encoder.EBranchformerEncoder", WIDTH, **ENCODER, **mlp, **block),
        encode,
        edits=OF_THE_LONGEST,
    ),
    Module(
        package,
        "EBranchformerEncoder, absolute positions",
        made(
            f"{new}.asr.encoder.e_branchformer_encoder.EBranchformerEncoder",
            WIDTH,
            **ENCODER,
            **mlp,
            **block,
            pos_enc_layer_type="abs_pos",
            attention_layer_type="selfattn",
        ),
        encode,
    ),
    Module(
        package,
        "Conv2dSubsampling",
        made(f"{rows}.subsampling.Conv2dSubsampling", WIDTH, WIDTH, 0.0),
        lambda m, b: m(b.x, None)[0],
        LONG,
    ),
    Module(
        package,
        "Conv1dSubsampling2",
        made(f"{rows}.subsampling.Conv1dSubsampling2", WIDTH, WIDTH, 0.0),
        lambda m, b: m(b.x, None)[0],
        LONG,
    ),
    Module(
        package,
        "TransformerDecoder",
        made(f"{new}.asr.decoder.transformer_decoder.TransformerDecoder", 11, WIDTH, HEADS, HIDDEN, 1, 0.0, 0.0),
        decode,
        edits=(MEMORY_MASK,),
    ),
    Module(
        package,
        "RNNEncoder",
        made(
            f"{new}.asr.encoder.rnn_encoder.RNNEncoder",
            WIDTH,
            num_layers=1,
            hidden_size=6,
            output_size=5,
            subsample=None,
        ),
        lambda m, b: m(b.x, b.lens)[:2],
        (12, 9, 7, 1),
    ),
    Module(
        package,
        "DurationPredictor",
        made(f"{old}.fastspeech.duration_predictor.DurationPredictor", WIDTH, 2, 6, 3, 0.0),
    ),
    Module(
        package,
        "VariancePredictor",
        made(f"{new}.tts.fastspeech2.variance_predictor.VariancePredictor", WIDTH, 2, 6, 3, True, 0.0),
    ),
    Module(
        package,
        "Tacotron2's Encoder",
        made(f"{old}.tacotron2.encoder.Encoder", 11, "embed", WIDTH, 1, 6, 2, 6, 3, dropout_rate=0.0),
        lambda m, b: m(b.x, b.lens),
        (12, 9, 7, 1),
        classes=11,
        train=False,
    ),
    Module(
        package,
        "EcapaTdnnEncoder",
        made(f"{new}.spk.encoder.ecapa_tdnn_encoder.EcapaTdnnEncoder", WIDTH, "EcapaBlock", 2, 8, 6),
        channels_last_ecapa,
        train=False,
    ),
    Module(
        package,
        "ChnAttnStatPooling",
        made(f"{new}.spk.pooling.chn_attn_stat_pooling.ChnAttnStatPooling", WIDTH),
        lambda m, b: m(b.x.transpose(1, 2)),
        train=False,
    ),
]
