"""Train a Wan transformer in a loop of your own: accelerate's Accelerator, a cache of mmspeed, and sequence parallelism.

    mmspeed preprocess my-run.yaml
    accelerate launch examples/accelerate_loop.py cache/my-set wan/transformer --out tuned
    accelerate launch --multi_gpu --num_processes 8 examples/accelerate_loop.py cache/my-set wan/transformer --ulysses 4 --out tuned

The cache must hold latents and captions of the model's own codec and text encoder. Legend: B batch, C channels, T h w latent,
L caption tokens, D text width.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from diffusers import WanTransformer3DModel
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mmspeed
from mmspeed.data import webdataset


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a Wan transformer from a cache, by accelerate.")
    parser.add_argument("cache", help="folder or URL of a cache that `mmspeed preprocess` made")
    parser.add_argument("transformer", help="folder of the transformer, as save_pretrained writes it")
    parser.add_argument("--out", required=True, help="folder to save the trained transformer in")
    parser.add_argument("--ulysses", type=int, default=1, help="processes that share each sample")
    parser.add_argument("--batch-size", type=int, default=1, help="samples of a step, of each group of processes")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--workers", type=int, default=2, help="processes that read, for each of training")
    parser.add_argument("--text-tokens", type=int, default=512, help="captions are padded with zeros to so many tokens")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    accelerator = Accelerator()  # starts the process group that accelerate_model needs
    set_seed(0)
    transformer = WanTransformer3DModel.from_pretrained(args.transformer).to(accelerator.device).train()
    transformer = mmspeed.accelerate_model(transformer, {"ulysses": args.ulysses})
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=args.lr)
    model, optimizer = accelerator.prepare(transformer, optimizer)

    # The loader is not prepared: the pipeline already splits the cache, over groups of processes instead of processes.
    data = webdataset(
        args.cache,
        batch_size=args.batch_size,
        noise=True,
        equal=True,
        rank=accelerator.process_index // args.ulysses,
        world=accelerator.num_processes // args.ulysses,
    )
    loader = DataLoader(data, batch_size=None, num_workers=args.workers)

    step = 0
    for epoch in range(args.epochs):
        data.set_epoch(epoch)
        for batch in loader:
            batch = send_to_device(batch, accelerator.device)
            t_B = batch["quantiles"].float()  # uniform times; those of training are a function of them
            t_B1111 = t_B[:, None, None, None, None]
            x_BCThw = (1 - t_B1111) * batch["latents"] + t_B1111 * batch["noise"]
            text_BLD = F.pad(batch["text"], (0, 0, 0, args.text_tokens - batch["text"].shape[1]))
            with accelerator.autocast():
                (velocity_BCThw,) = model(x_BCThw, 1000 * t_B, text_BLD, return_dict=False)
            loss = F.mse_loss(velocity_BCThw.float(), batch["noise"] - batch["latents"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"epoch {epoch} step {step} loss {mean:.6f}")
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
