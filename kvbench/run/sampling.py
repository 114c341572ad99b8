"""Settings of sampling; `kvbench.engine.sequence` samples the tokens."""

from dataclasses import dataclass

from kvbench.errors import ConfigError, number, whole_number


@dataclass(frozen=True)
class Sampling:
    """Tokens are sampled from softmax(logits / temperature), from the `top_k` most likely ones and the `top_p` nucleus.

    temperature: 0 is greedy. top_p: total probability of the most likely tokens to sample from; 1: all. top_k: number
    of most likely tokens to sample from; 0: all. Order and ties are those of transformers' logits warpers.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        number("top_p", self.top_p, 0, 1)
        whole_number("top_k", self.top_k, 0)
        if self.top_p == 0:
            raise ConfigError("top_p", self.top_p, "a number above 0 and at most 1")
        if self.greedy and (self.top_p, self.top_k) != (1, 0):
            name = "top_k" if self.top_k else "top_p"
            raise ConfigError(name, getattr(self, name), why="has no effect: decoding is greedy, set temperature")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0


def check_samples(sampling: Sampling, samples: int) -> None:
    """Raise ConfigError if a prompt cannot have this number of answers."""
    whole_number("samples", samples, 1)
    if sampling.greedy and samples > 1:
        raise ConfigError("samples", samples, why="has no effect: decoding is greedy, set temperature")
