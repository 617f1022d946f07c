"""Latent Dirichlet allocation by online variational Bayes (Hoffman, Blei, Bach 2010).

A step of theirs, lambda <- (1 - rho) lambda + rho lambda_hat, is a step of gradient descent at the
rate rho along the natural gradient lambda - lambda_hat: so that is the gradient, and `sgd`, with a
mean over the documents, makes their updates. The E-step of a document is theirs (Algorithm 2), but
begins at gamma = 1 instead of at random: the same document gives the same gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from common.data.fields import INTEGERS, NUMBERS, Input
from common.learning.sparse_tasks import check_inside

_CONVERGED = 1e-3  # mean change of a document's gamma, as in Hoffman's program
_TINY = 1e-30  # beside a probability, so that it can be divided by


class Topics(nn.Module):
    """lambda: how much of each word is of each topic, (words, topics), around 1 at first."""

    def __init__(self, words: int, topics: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, topics))
        nn.init.trunc_normal_(self.weight, 1.0, 0.1, 0.5, 1.5)  # theirs: gamma(100, 1/100), alike

    def forward(self, index: Tensor) -> Tensor:
        """(n, m, topics) the rows of each document's words."""
        return functions.embedding(index, self.weight)


@dataclass(frozen=True, slots=True)
class TopicModel:
    """Topics of documents; a document is up to `entries` words, each with its count."""

    words: int  # W
    entries: int
    topics: int  # K
    documents: int  # D: of the whole collection, which a batch stands for
    alpha: float  # of each document's topics
    eta: float  # of each topic's words
    iterations: int  # of the E-step, at most

    def build(self) -> nn.Module:
        """Make the topics, each a little different."""
        return Topics(self.words, self.topics)

    def inputs(self) -> Mapping[str, Input]:
        """Which words, and how often each."""
        return {"index": Input((self.entries,), INTEGERS), "value": Input((self.entries,), NUMBERS)}

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) what each word of a document costs: -(its part of the evidence lower bound) / words.

        What is differentiated is not that but a line along the natural gradient.

        Raises:
            ValueError: If there is no such word, a count is below zero, or lambda is not above it.
        """
        index, counts = check_inside("index", records["index"], self.words), records["value"]
        if bool((counts < 0).any()):
            raise ValueError("value: a count is below zero")
        weight: Tensor = next(module.parameters())
        looked_up = module(index)
        with torch.no_grad():
            if not bool((weight > 0).all()):
                raise ValueError("a topic's weight is not above zero: take smaller steps of sgd")
            topics = torch.exp(torch.digamma(looked_up) - torch.digamma(weight.sum(0)))
            costs, statistics = self._fit(topics, counts.float())
        prior = (weight * (weight.detach() - self.eta)).sum()
        lines = prior - self.documents * (looked_up * statistics).sum((1, 2))
        outputs: Tensor = costs + (lines - lines.detach())
        return outputs

    def losses(self, outputs: Tensor, records: Mapping[str, Tensor]) -> Tensor:
        """(n,) what `forward` found."""
        del records
        return outputs

    def metrics(self, outputs: Tensor, records: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """None: the exponential of the mean loss bounds the perplexity."""
        del outputs, records
        return {}

    def _fit(self, topics: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The E-step: (n,) costs and (n, m, topics) expected counts of each word by topic.

        A document stops for itself, so that it does not matter which others are beside it.

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
        """(n,) E[log p(theta | alpha) - log q(theta | gamma)]."""
        alpha = torch.full_like(gamma, self.alpha)
        return (
            ((alpha - gamma) * shares.log() + gamma.lgamma() - alpha.lgamma()).sum(1)
            + alpha.sum(1).lgamma()
            - gamma.sum(1).lgamma()
        )


def _expected(gamma: Tensor, topics: Tensor) -> tuple[Tensor, Tensor]:
    """(n, topics) exp E[log theta], and (n, m) its products with each word's topics."""
    shares = torch.exp(torch.digamma(gamma) - torch.digamma(gamma.sum(1, keepdim=True)))
    return shares, (topics @ shares.unsqueeze(2)).squeeze(2) + _TINY
