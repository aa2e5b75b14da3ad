"""The names of layers that the authors of published models gave them, for files of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmspeed.errors import UserError


@dataclass(frozen=True)
class Names:
    """The authors' names of a class's layers: patterns of names here (`*` is a number) -> theirs; several have one where they are fused."""

    layers: Mapping[str, str]
    needs: str = ""  # a part of a name without which diffusers does not see whose names a file has

    def of(self, layer: str) -> str | None:
        """The authors' name of a layer; None for one that their readers do not know."""
        for pattern, theirs in self.layers.items():
            found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)").replace("%", "(.+)"), layer)
            if found is not None:
                same = found[1] if found.lastindex else ""
                return theirs.replace("*", same).replace("%", same)
        return None


def _in_blocks(theirs: str, ours: str, layers: Mapping[str, str]) -> dict[str, str]:
    return {f"{ours}.*.{own}": f"{theirs}.*.{name}" for own, name in layers.items()}


_ENDS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_WAN = Names(
    _in_blocks(
        "blocks",
        "blocks",
        {f"attn1.{own}": f"self_attn.{name}" for own, name in _ENDS.items()}
        | {f"attn2.{own}": f"cross_attn.{name}" for own, name in _ENDS.items()}
        | {"attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img"}
        | {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
    )
    | {"condition_embedder.text_embedder.linear_1": "text_embedding.0"}
    | {"condition_embedder.text_embedder.linear_2": "text_embedding.2"}
    | {"condition_embedder.time_embedder.linear_1": "time_embedding.0"}
    | {"condition_embedder.time_embedder.linear_2": "time_embedding.2"}
    | {"condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head"}
    | {"condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1"}
    | {"condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3"},
    needs="blocks.",
)
_HUNYUAN_VIDEO = Names(
    _in_blocks(
        "double_blocks",
        "transformer_blocks",
        {f"attn.to_{part}": "img_attn_qkv" for part in "qkv"}
        | {f"attn.add_{part}_proj": "txt_attn_qkv" for part in "qkv"}
        | {"attn.to_out.0": "img_attn_proj", "attn.to_add_out": "txt_attn_proj"}
        | {"norm1.linear": "img_mod.linear", "norm1_context.linear": "txt_mod.linear"}
        | {"ff.net.0.proj": "img_mlp.fc1", "ff.net.2": "img_mlp.fc2"}
        | {"ff_context.net.0.proj": "txt_mlp.fc1", "ff_context.net.2": "txt_mlp.fc2"},
    )
    | _in_blocks(
        "single_blocks",
        "single_transformer_blocks",
        {"attn.to_q": "linear1", "attn.to_k": "linear1", "attn.to_v": "linear1", "proj_mlp": "linear1"}
        | {"proj_out": "linear2", "norm.linear": "modulation.linear"},
    )
    | {"context_embedder.proj_in": "txt_in.input_embedder", "proj_out": "final_layer.linear"},
    needs="img_attn_qkv",
)
_LTX = Names({name: name for name in ("transformer_blocks.%", "caption_projection.%", "proj_out")})
FAMILIES = {
    "WanTransformer3DModel": _WAN,
    "LTXVideoTransformer3DModel": _LTX,
    "QwenImageTransformer2DModel": Names({"%": "%"}),
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
}
REFUSED = {
    "FluxTransformer2DModel": "ComfyUI reads diffusers' names under `transformer.` for it, and matches nothing under `diffusion_model.`",
    "CogVideoXTransformer3DModel": "no tool reads such names of it",
    "MochiTransformer3DModel": "no tool reads such names of it",
    "HunyuanVideo15Transformer3DModel": "diffusers loads no adapters for it, so that what is written could not be proved",
}


def authors_names(kind: str, what: str) -> Names:
    """The authors' names of a class of diffusers. Raises UserError, which begins with `what`, where nothing reads them."""
    if kind not in FAMILIES:
        raise UserError(
            f"{what}: {kind} has no file of its authors' names: {REFUSED.get(kind, 'diffusers reads none')}"
        )
    return FAMILIES[kind]
