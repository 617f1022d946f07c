"""Latent Dirichlet allocation by online variational Bayes (Hoffman, Blei, Bach 2010).

The paper's step, lambda <- (1 - rho) lambda + rho lambda_hat, is gradient descent at rate rho along
the natural gradient lambda - lambda_hat. So this is the gradient here, and `sgd` with a mean over
the documents makes the paper's updates. The E-step of a document is the paper's Algorithm 2, but
starts at gamma = 1 instead of at random, so that the same document gives the same gradient on all
workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import INTEGERS, NUMBERS, Input
from common.learning.sparse_tasks import check_inside

# Mean change of a document's gamma, as in Hoffman's program.
_CONVERGED = 1e-3
# Added to probabilities, so that they can be divisors.
_TINY = 1e-30


class Topics(nn.Module):
    """lambda: weight of each word in each topic, (words, topics), initially around 1."""

    def __init__(self, words: int, topics: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, topics))
        # The paper draws from gamma(100, 1/100), which has almost the same mean and deviation.
        nn.init.trunc_normal_(self.weight, 1.0, 0.1, 0.5, 1.5)

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows of each document's words, (n, m, topics)."""
        return functions.embedding(index, self.weight)


@dataclass(frozen=True, slots=True)
class TopicModel:
    """Topics of documents. A document has up to `entries` words, each with a count."""

    words: int  # W
    entries: int
    topics: int  # K
    # D, number of documents in the whole collection.
    documents: int
    # Prior of each document's topics.
    alpha: float
    # Prior of each topic's words.
    eta: float
    # Maximum number of iterations of the E-step.
    iterations: int

    def build(self) -> nn.Module:
        """Make the topics, with random differences."""
        return Topics(self.words, self.topics)

    def inputs(self) -> Mapping[str, Input]:
        """Return the input fields: words, and their counts."""
        return {"index": Input((self.entries,), INTEGERS), "value": Input((self.entries,), NUMBERS)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """Return -(evidence lower bound of a document) / words, (n,).

        The gradient of this output is not that of the bound, but the natural gradient.

        Raises:
            ValueError: If a word does not exist, a count is below zero, or a lambda is not above
                zero.
        """
        index, counts = check_inside("index", records["index"], self.words), records["value"]
        if bool((counts < 0).any()):
            raise ValueError("value: a count is below zero")
        weight: Tensor = next(module.parameters())
        looked_up = module(index)
        with torch.no_grad():
            if not bool((weight > 0).all()):
                raise ValueError("a topic's weight is not above zero; use a smaller learning rate")
            topics = torch.exp(torch.digamma(looked_up) - torch.digamma(weight.sum(0)))
            costs, statistics = self._fit(topics, counts.float())
        prior = (weight * (weight.detach() - self.eta)).sum()
        lines = prior - self.documents * (looked_up * statistics).sum((1, 2))
        outputs: Tensor = costs + (lines - lines.detach())
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs of `forward`, (n,)."""
        del records
        return outputs

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return no metrics. The exponential of the mean loss bounds the perplexity."""
        del outputs, records
        return {}

    def _fit(self, topics: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Run the E-step; return costs (n,) and expected counts per word and topic (n, m, topics).

        Each document stops on its own, so the result does not depend on the others in the batch.

        Args:
            topics: (n, m, topics) exp E[log beta] of each document's words.
            counts: (n, m)
        """
        gamma = torch.ones_like(topics[:, 0])
        going = torch.ones_like(gamma[:, :1], dtype=torch.bool)
        for _ in range(self.iterations):
            shares, chances = _expected(gamma, topics)
            found = self.alpha + shares * ((counts / chances).unsqueeze(1) @ topics).squeeze(1)
            change = (found - gamma).abs().mean(1, keepdim=True)
            gamma = torch.where(going, found, gamma)
            going = going & (change >= _CONVERGED)
            if not bool(going.any()):
                break
        shares, chances = _expected(gamma, topics)
        bound = (counts * chances.log()).sum(1) + self._against_prior(gamma, shares)
        statistics = (counts / chances).unsqueeze(2) * shares.unsqueeze(1) * topics
        return -bound / counts.sum(1).clamp_min(1), statistics

    def _against_prior(self, gamma: Tensor, shares: Tensor) -> Tensor:
        """Return E[log p(theta | alpha) - log q(theta | gamma)], (n,)."""
        alpha = torch.full_like(gamma, self.alpha)
        return (
            ((alpha - gamma) * shares.log() + gamma.lgamma() - alpha.lgamma()).sum(1)
            + alpha.sum(1).lgamma()
            - gamma.sum(1).lgamma()
        )


def _expected(gamma: Tensor, topics: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp E[log theta], (n, topics), and its products with each word's topics, (n, m)."""
    shares = torch.exp(torch.digamma(gamma) - torch.digamma(gamma.sum(1, keepdim=True)))
    return shares, (topics @ shares.unsqueeze(2)).squeeze(2) + _TINY
