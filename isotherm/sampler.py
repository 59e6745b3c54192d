"""Sampling and scoring with a model in this process: blocking calls of the embedded engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from actors.embedded.engine import EmbeddedEngine
from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from distill.chat.responses import response_text
from distill.chat.template import render_messages, render_text
from distill.engine import GenerateRequest, Sample, Score, ScoreRequest
from distill.errors import ConfigError, DataError, EngineError
from distill.models.loading import ends_of, load_config, vocab_size
from distill.objective.batching import TrainingRow
from distill.sampling import EvalSampling, Sampling, TrainSampling
from distill.stops import StopSettings
from distill.tokenizer import load_tokenizer
from distill.types import FloatArray, StopReason, TokenArray, Tokenizer

# A text, encoded unchanged; the messages of a chat, for the model's template; or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A prompt with one sampled completion.

    Attributes:
        prompt_T: token ids of the prompt.
        sample: tokens, log p_T, weight versions and stop reason, as returned by the engine.
        temperature: T of the sampling and of the log-probs.
        text: the decoded sampled tokens, without the stop token at their end.
    """

    prompt_T: TokenArray
    sample: Sample
    temperature: float
    text: str

    @property
    def tokens_T(self) -> TokenArray:
        """The sampled token ids, including the stop token."""
        return self.sample.tokens_T

    @property
    def logprobs_T(self) -> FloatArray:
        """log p_T of the sampled tokens, under the weights that sampled them."""
        return self.sample.logprobs_T

    @property
    def stop_reason(self) -> StopReason:
        return self.sample.stop_reason

    @property
    def chain_T(self) -> TokenArray:
        """Token ids of the prompt, followed by the sampled ones."""
        return np.concatenate([self.prompt_T, self.tokens_T]).astype(np.int32)

    @property
    def start(self) -> int:
        """Index of the first sampled token in `chain_T`."""
        return len(self.prompt_T)

    def row(self, advantages: float | npt.ArrayLike) -> TrainingRow:
        """The completion as a training row. The loss is computed at the completion's temperature.

        Args:
            advantages: one number for all sampled tokens, or one for each.

        Raises:
            ConfigError: the completion was sampled greedily (temperature 0).
            DataError: the completion has no tokens, or the advantages have another length, or are
                not finite.
        """
        given = np.asarray(advantages, np.float32)
        if given.shape not in ((), self.tokens_T.shape):
            raise DataError(
                f"advantages have the shape {given.shape}, but {len(self.tokens_T)} tokens were "
                "sampled; give one number, or one for each token"
            )
        on_sample_N = np.broadcast_to(given, self.tokens_T.shape)
        before_T = np.zeros(self.start, np.float32)
        return TrainingRow(
            tokens_T=self.chain_T,
            loss_mask_T=np.arange(len(self.chain_T)) >= self.start,
            advantages_T=np.concatenate([before_T, on_sample_N]),
            behaviour_logprobs_T=np.concatenate([before_T, self.logprobs_T]),
            temperature=self.temperature,
            source=f"a completion of {self.text[:20]!r}",
        )


class Samples(ABC):
    """Base class with `sample` and `sample_batch`."""

    @abstractmethod
    def _sampled(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, seed: int | None
    ) -> list[list[Completion]]:
        """Completions of each prompt. The seed of the i-th prompt is `seed` + i."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine. No other method may be called afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def sample(
        self,
        prompt: Prompt,
        *,
        temperature: float,
        max_new_tokens: int,
        num_samples: int = 1,
        seed: int | None = None,
    ) -> list[Completion]:
        """Sample from softmax(z / T) without truncation; greedily at temperature 0.

        Samples are a function of weights, prompt, temperature and `seed`.

        Raises:
            ConfigError, DataError: a value is out of range, or the prompt fills the context.
        """
        return self.sample_batch(
            [prompt],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            seed=seed,
        )[0]

    def sample_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        max_new_tokens: int,
        num_samples: int = 1,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """Sample `num_samples` completions of each prompt, all in one batch.

        Args:
            seed: seed of the first prompt; the next prompts have the next seeds.
        """
        sampling: Sampling = (
            TrainSampling(temperature=temperature, max_new_tokens=max_new_tokens)
            if temperature
            else EvalSampling(temperature=temperature, max_new_tokens=max_new_tokens)
        )
        return self._sampled(prompts, sampling, num_samples, seed)


class Sampler(Samples):
    """A model that samples and scores. It runs in its own thread until `close`.

    Attributes:
        tokenizer: tokenizer of the checkpoint.
        engine: handle of the `EmbeddedEngine`, for methods that this class does not wrap.
        next_seed: seed of the next prompt without a given seed; incremented by each prompt.
        stops: tokens at which samples end.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        seed: int = 0,
        stop_tokens: str = "",
    ) -> None:
        """
        Args:
            model: Hugging Face checkpoint directory (or hub name).
            dtype: dtype of weights and activations; log-probs are always float32.
            seed: initial `next_seed`.
            stop_tokens: see the setting of this name; empty: those of the checkpoint and its
                tokenizer.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: a stop token is not in the vocabulary.
        """
        self.tokenizer: Tokenizer = load_tokenizer(model)
        ends = [ends_of(model, self.tokenizer)]
        size = vocab_size(load_config(model))
        chosen = StopSettings(stop_tokens=stop_tokens).stops(self.tokenizer, ends, size)
        # For the sampler and for `Policy`, each stop token is a separate outcome.
        self.stops = replace(chosen, one_event=False)
        self.engine: Any = LocalActor(
            EmbeddedEngine, model_path=model, dtype=dtype, device=device, stops=self.stops
        )
        self.next_seed = seed
        _value(self.engine.info.remote())

    @property
    def version(self) -> int:
        """Version of the sampler's weights; 0: those of the checkpoint."""
        return _value(self.engine.info.remote()).weight_version

    def encode(self, prompt: Prompt) -> TokenArray:
        """Token ids of a prompt.

        Raises:
            ConfigError: the prompt is not a text, a list of messages or an array of ids.
        """
        if isinstance(prompt, str):
            return render_text(self.tokenizer, prompt)
        if isinstance(prompt, np.ndarray):
            return prompt.astype(np.int32)
        if not prompt or not all(isinstance(message, Mapping) for message in prompt):
            raise ConfigError(
                "a prompt is a text, a list of messages ({'role': ..., 'content': ...}) or a numpy "
                f"array of token ids, not {prompt!r:.80}; sample_batch takes several prompts",
                field="prompt",
            )
        return render_messages(self.tokenizer, prompt)

    def _sampled(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, seed: int | None
    ) -> list[list[Completion]]:
        if seed is None:
            seed, self.next_seed = self.next_seed, self.next_seed + len(prompts)
        prompts_P = [self.encode(prompt) for prompt in prompts]
        pending = [
            self.engine.generate.remote(
                GenerateRequest(
                    prompt_tokens_T=prompt_T,
                    sampling=sampling,
                    num_samples=num_samples,
                    seed=seed + i,
                )
            )
            for i, prompt_T in enumerate(prompts_P)
        ]
        return [
            [
                self._completion(prompt_T, sample, sampling.temperature)
                for sample in _value(reference)
            ]
            for prompt_T, reference in zip(prompts_P, pending, strict=True)
        ]

    def _completion(self, prompt_T: TokenArray, sample: Sample, temperature: float) -> Completion:
        text = response_text(self.tokenizer, prompt_T, sample)
        return Completion(prompt_T=prompt_T, sample=sample, temperature=temperature, text=text)

    def score(
        self, completions: Sequence[Completion], *, temperature: float | None = None
    ) -> list[FloatArray]:
        """Log-probs of the completions' sampled tokens under this model, one array for each.

        Args:
            temperature: T of the scores; None: each completion's own temperature. A loss needs
                scores at the completion's own temperature.

        Raises:
            ConfigError: the temperature is not above 0.
            DataError: tokens are not in the model's vocabulary.
        """
        requests = [
            ScoreRequest(
                tokens_T=each.chain_T,
                start=each.start,
                temperatures=(each.temperature if temperature is None else temperature,),
            )
            for each in completions
        ]
        scores: list[Score] = _value(self.engine.score.remote(requests))
        return [score.logprobs_by_temperature[0] for score in scores]

    def logprobs(self, tokens: npt.ArrayLike, *, temperature: float, start: int = 1) -> FloatArray:
        """log softmax(z / T) of given tokens, from index `start` to the end.

        Raises:
            ConfigError, DataError: a value is out of range, or tokens are not in the vocabulary.
        """
        tokens_T = np.asarray(tokens, np.int32)
        request = ScoreRequest(tokens_T=tokens_T, start=start, temperatures=(temperature,))
        [score] = _value(self.engine.score.remote([request]))
        return score.logprobs_by_temperature[0]

    def close(self) -> None:
        """End the thread. No other method may be called afterwards."""
        calls.kill(self.engine)


def _value(reference: Any) -> Any:
    """Result of a call of the engine. Raises the engine's own error, not Ray's wrapper."""
    try:
        return calls.get(reference)
    except errors.RayActorError:
        raise EngineError("the sampler is closed; make a new Sampler (or Policy)") from None
    except errors.RayError as error:
        raise calls.root_cause(error) from None
