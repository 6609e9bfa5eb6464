"""The trained model: a small recurrent language model over bytes. Real gradients, on a CPU or a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

VOCABULARY = 256
_LONGEST = 128


class Learner:
    """One optimiser step per sample; losses fall because what the engines say repeats."""

    def __init__(self, seed: int, width: int = 32) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, width),
                "recurrent": nn.GRU(width, width, batch_first=True),
                "head": nn.Linear(width, VOCABULARY),
            }
        ).to(self.device)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def step(self, texts: Sequence[str]) -> float:
        """Learns to say what was said; the mean loss before the step, nats per byte."""
        losses = []
        for text in texts:
            said = text.encode()[:_LONGEST]
            if len(said) < 2:
                continue
            ids = torch.tensor([list(said)], device=self.device)
            hidden, _ = self.model["recurrent"](self.model["embedding"](ids[:, :-1]))
            loss = nn.functional.cross_entropy(self.model["head"](hidden).flatten(0, 1), ids[:, 1:].flatten())
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses) if losses else float("nan")
