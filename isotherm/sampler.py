"""Sampling and scoring by a model in this process: the embedded engine, with plain calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.embedded.engine import EmbeddedEngine
from cluster.handles import calls, errors
from cluster.handles.failures import root_cause
from cluster.handles.local_actor import LocalActor
from distill.chat.responses import response_text
from distill.chat.template import render_messages, render_text
from distill.engine import GenerateRequest, Sample, Score, ScoreRequest
from distill.errors import ConfigError, DataError, EngineError
from distill.models.loading import ends_of
from distill.objective.batching import TrainingRow
from distill.sampling import EvalSampling, Sampling, TrainSampling
from distill.stops import StopSettings
from distill.tokenizer import load_tokenizer
from distill.types import FloatArray, StopReason, TokenArray

# A text as it stands, the messages of a chat through the model's template, or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A prompt and what was sampled after it.

    Attributes:
        prompt_T: the prompt's token ids.
        sample: tokens, log p_T, weight versions and stop reason, as the engine returned them.
        temperature: the T of the sampling and of the log-probs.
        text: the sampled tokens, decoded; the stop token that ended them is not in it.
    """

    prompt_T: TokenArray
    sample: Sample
    temperature: float
    text: str

    @property
    def tokens_T(self) -> TokenArray:
        """The sampled token ids, the stop token among them."""
        return self.sample.tokens_T

    @property
    def logprobs_T(self) -> FloatArray:
        """log p_T of the sampled tokens, by the weights that sampled them."""
        return self.sample.logprobs_T

    @property
    def stop_reason(self) -> StopReason:
        return self.sample.stop_reason

    @property
    def chain_T(self) -> TokenArray:
        """Prompt and sampled tokens, end to end."""
        return np.concatenate([self.prompt_T, self.tokens_T]).astype(np.int32)

    @property
    def start(self) -> int:
        """Index of the first sampled token in `chain_T`."""
        return len(self.prompt_T)

    def row(self, advantages: float | npt.ArrayLike) -> TrainingRow:
        """The completion as a training row; the loss is at its own temperature.

        Args:
            advantages: one number for all sampled tokens, or one for each.

        Raises:
            ConfigError: it was sampled greedily (temperature 0).
            DataError: nothing was sampled, or the advantages are of another number, or not finite.
        """
        given = np.asarray(advantages, np.float32)
        if given.shape not in ((), self.tokens_T.shape):
            raise DataError(
                f"advantages have the shape {given.shape}, and {len(self.tokens_T)} tokens were "
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
    """Sampling by the weights that are held; a policy's are those of its last push."""

    @abstractmethod
    def _sampled(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, seed: int | None
    ) -> list[list[Completion]]:
        """The completions of each prompt; the i-th one's seed is `seed` + i."""

    @abstractmethod
    def close(self) -> None:
        """Ends the sampling; no call may follow."""

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
        """Samples from softmax(z / T), nothing truncated; greedily at temperature 0.

        Samples are a function of weights, prompt, temperature and `seed`.

        Raises:
            ConfigError, DataError: a value out of range, or a prompt that fills the context.
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
        """`num_samples` completions of each prompt, all of them decoded together.

        Args:
            seed: of the first prompt; the others count on from it.
        """
        sampling: Sampling = (
            TrainSampling(temperature=temperature, max_new_tokens=max_new_tokens)
            if temperature
            else EvalSampling(temperature=temperature, max_new_tokens=max_new_tokens)
        )
        return self._sampled(prompts, sampling, num_samples, seed)


class Sampler(Samples):
    """A model that samples and scores. It has a thread of its own, until `close`.

    Attributes:
        tokenizer: the checkpoint's.
        engine: handle of the `EmbeddedEngine`, for all else that it can do.
        next_seed: of the next call of `sample` that names none; it counts up.
        stops: where samples end.
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
            dtype: of weights and activations; log-probs are float32 whatever it is.
            seed: of the first call of `sample` that names none.
            stop_tokens: as the setting of that name; empty: the checkpoint's and its tokenizer's.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: a stop token that is no token.
        """
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
        ends = [ends_of(model, self.tokenizer)]
        chosen = StopSettings(stop_tokens=stop_tokens).stops(self.tokenizer, ends)
        # Each is an outcome of its own, to the sampler and to `Policy`.
        self.stops = replace(chosen, one_event=False)
        self.engine: Any = LocalActor(
            EmbeddedEngine, model_path=model, dtype=dtype, device=device, stops=self.stops
        )
        self.next_seed = seed
        _value(self.engine.info.remote())

    @property
    def version(self) -> int:
        """Version of the weights that it holds; 0: those of the checkpoint."""
        return _value(self.engine.info.remote()).weight_version

    def encode(self, prompt: Prompt) -> TokenArray:
        """Token ids of a prompt.

        Raises:
            ConfigError: it is no text, no messages and no array of ids.
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
        """Log-probs of completions' sampled tokens by this model's weights, one array for each.

        Args:
            temperature: None: each completion's own, which is what a loss may be made of.

        Raises:
            ConfigError: a temperature that is not above 0.
            DataError: tokens that the model lacks.
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
            ConfigError, DataError: a value out of range, or tokens that the model lacks.
        """
        tokens_T = np.asarray(tokens, np.int32)
        request = ScoreRequest(tokens_T=tokens_T, start=start, temperatures=(temperature,))
        [score] = _value(self.engine.score.remote([request]))
        return score.logprobs_by_temperature[0]

    def close(self) -> None:
        """Ends the thread; no call may follow."""
        calls.kill(self.engine)


def _value(reference: Any) -> Any:
    """The value of a call; what it raised, as the engine raised it."""
    try:
        return calls.get(reference)
    except errors.RayActorError:
        raise EngineError("the sampler is closed; make a new Sampler (or Policy)") from None
    except errors.RayError as error:
        raise root_cause(error) from None
