"""Files of `mmspeed export --format original`, read by ComfyUI or musubi-tuner: the change that their own loaders make to each layer.

python -m tests.claims.adapter_readers comfyui|musubi CHECKOUT

CHECKOUT is a folder of the reader's source. Its own class of the model, of the sizes of a tiny repository, with zeros as weights, is given
the file by the reader's own loader; diffusers' conversion of such checkpoints names the layers. Each must hold scale * B @ A of the run, and
all others zeros. What the reader imports must be installed, such as einops, torchsde and torchvision for ComfyUI.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from diffusers.loaders import lora_conversion_utils, lora_pipeline, single_file_utils
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspeed.config.adapters import AdapterConfig
from mmspeed.pipelines.inference.export_adapter import STEM, export_adapter
from tests.support.checkpoints import whole_checkpoint
from tests.support.official_pipelines import narrowed
from tests.support.tiny_repositories import REPOSITORIES
from tests.unit.pipelines.test_adapter_files import OUTSIDE
from tests.unit.pipelines.test_export_adapters import LORA, adapted_run

# family -> diffusers' conversion of weights, the reader's (class or module of adapters, module, class of the model)
FAMILIES: dict[str, tuple[str, dict[str, tuple[str, str, str]]]] = {
    "wan": ("wan_transformer", {
        "comfyui": ("WAN21_T2V", "comfy.ldm.wan.model", "WanModel"), "musubi": ("lora_wan", "wan.modules.model", "WanModel"),
    }),
    "ltx": ("ltx_transformer_checkpoint", {"comfyui": ("LTXV", "comfy.ldm.lightricks.model", "LTXVModel")}),
    "qwen-image": ("", {
        "comfyui": ("QwenImage", "comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel"),
        "musubi": ("lora_qwen_image", "qwen_image.qwen_image_model", "QwenImageTransformer2DModel"),
    }),
    "hunyuan-video": ("hunyuan_video_transformer", {
        "comfyui": ("HunyuanVideo", "comfy.ldm.hunyuan_video.model", "HunyuanVideoParams"),
        "musubi": ("lora", "hunyuan_model.models", "HYVideoDiffusionTransformer"),
    }),
}  # fmt: skip
SIZES = {
    "in_channels": "in_dim", "out_channels": "out_dim", "num_attention_heads": "num_heads heads_num", "width": "dim hidden_size",
    "pooled_projection_dim": "vec_in_dim text_states_dim_2", "text_embed_dim": "context_in_dim text_states_dim",
    "num_layers": "depth mm_double_blocks_depth", "num_single_layers": "depth_single_blocks mm_single_blocks_depth",
    "guidance_embeds": "guidance_embed", "rope_axes_dim": "axes_dim rope_dim_list",
}  # fmt: skip
# names of HunyuanVideo that ComfyUI's class has -> the authors'
AUTHORS = {
    "_attn.qkv.": "_attn_qkv.", "_attn.proj.": "_attn_proj.", "_mod.lin.": "_mod.linear.", "modulation.lin.": "modulation.linear.",
    "_mlp.0.": "_mlp.fc1.", "_mlp.2.": "_mlp.fc2.",
}  # fmt: skip
WIDTH, READ = 24, "_convert_hunyuan_video_lora_to_diffusers"  # diffusers knows the published width alone


def comfyui(names: tuple[str, str, str], config: dict[str, Any], file: Path) -> dict[str, Tensor]:
    """The weights of ComfyUI's class after its loader of adapters."""
    sys.argv = [sys.argv[0], "--cpu"]
    import_module("comfy.options").enable_args_parsing()
    sd, utils, patcher = (import_module(f"comfy.{name}") for name in ("sd", "utils", "model_patcher"))
    kind = getattr(import_module("comfy.supported_models"), names[0])
    sizes = kind.unet_config | _known(config, getattr(import_module(names[1]), names[2]))
    model = kind(sizes).get_model({}, "", device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    device = torch.device("cpu")
    lora = utils.load_torch_file(str(file))
    patched, _ = sd.load_lora_for_models(patcher.ModelPatcher(model, device, device), None, lora, 1.0, 0.0)
    patched.patch_model()
    weights = dict(model.diffusion_model.state_dict())
    for theirs, name in AUTHORS.items() if names[0] == "HunyuanVideo" else ():
        weights = {key.replace(theirs, name): tensor for key, tensor in weights.items()}
    return weights


def musubi(names: tuple[str, str, str], config: dict[str, Any], file: Path) -> dict[str, Tensor]:
    """The weights of musubi-tuner's class after its conversion of the file and its loader."""
    torch.cuda.current_device = lambda: 0  # a default of an argument there
    kind = getattr(import_module(f"musubi_tuner.{names[1]}"), names[2])
    model = kind(**_known(config, kind), attn_mode="torch")
    for parameter in model.parameters():
        parameter.data.zero_()
    stored = import_module("musubi_tuner.convert_lora").convert_from_diffusers("lora_unet_", load_file(file))
    loader = import_module(f"musubi_tuner.networks.{names[0]}")
    network = loader.create_arch_network_from_weights(1.0, stored, unet=model, for_inference=True)
    for layer in {name.split(".")[0] for name in stored} - {lora.lora_name for lora in network.unet_loras}:
        logging.warning(f"lora: no layer for {layer}")
    network.merge_to(None, model, stored, device=torch.device("cpu"))
    return dict(model.state_dict())


def _known(config: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The sizes in a transformer's config of diffusers that the authors' class has, under its names."""
    sizes = config | {"width": WIDTH, "theta": 256, "byt5": False, "meanflow": False, "qkv_bias": True}
    sizes |= {"patch_size": [1, 2, 2]} if "patch_size_t" in config else {}
    named = {name: sizes[ours] for ours, theirs in SIZES.items() if ours in sizes for name in theirs.split()}
    known = inspect.signature(kind).parameters
    return {name: size for name, size in (sizes | named).items() if name in known}


def compared(reader: str, checkout: str, family: str, folder: Path) -> str:
    """A line of what a reader made of a file, beside what the run has; in a process of its own."""
    sys.path[:0] = [checkout, f"{checkout}/src"]
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    config = json.loads((folder / "base" / "transformer" / "config.json").read_text())
    file, (conversion, names) = folder / "out" / f"{STEM}.safetensors", FAMILIES[family]
    weights = {"comfyui": comfyui, "musubi": musubi}[reader](names[reader], config, file)
    if conversion:
        weights = narrowed(single_file_utils, f"convert_{conversion}_to_diffusers", WIDTH)(weights)
    wanted = load_file(folder / "wanted.safetensors")
    far = max(float((weights[name] - tensor).norm() / tensor.norm()) for name, tensor in wanted.items())
    others = [name for name, tensor in weights.items() if name not in wanted and tensor.any()]
    others += [line for line in warned if "lora" in line.lower()]
    word = "read" if far < 1e-6 and not others else "NOT READ"
    return f"{word}: {len(load_file(file)) // 2} layers there, {len(wanted)} here, farthest {far:.1e} {others[:3]}"


def main() -> None:
    """Print a line for each family that the reader knows: of adapters in the blocks, and for ComfyUI of some outside them."""
    reader, checkout = sys.argv[1:]
    for family in (family for family, (_, names) in FAMILIES.items() if reader in names):
        for targets in ("blocks", OUTSIDE[family]) if reader == "comfyui" else ("blocks",):
            with TemporaryDirectory() as place, get_context("spawn").Pool(1) as pool:
                folder, adapter = Path(place), {**LORA, "targets": targets}
                run, _ = adapted_run(folder, REPOSITORIES[family](folder / "base"), adapter)
                with patch.object(lora_pipeline, READ, narrowed(lora_conversion_utils, READ, WIDTH)):
                    export_adapter(run, folder / "out", format="original")
                stored, scale = whole_checkpoint(run), AdapterConfig(**adapter).scale
                down, up = ".lora_A.default.weight", ".lora_B.default.weight"
                names = [name[6:].removesuffix(down) for name in stored if name.startswith("model.") and down in name]
                wanted = {f"{n}.weight": scale * stored[f"model.{n}{up}"] @ stored[f"model.{n}{down}"] for n in names}
                save_file(wanted, folder / "wanted.safetensors")
                said = pool.apply(compared, (reader, checkout, family, folder))
                print(f"{reader} {family} {'in' if targets == 'blocks' else 'outside'} blocks: {said}", flush=True)


if __name__ == "__main__":
    main()
