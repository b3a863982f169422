"""One answer as it is written: which token comes next, how likely, what text it makes, and when it ends.

A prompt that has been read, ready to be continued: next-token scores, advancing, scoring given answers.
"""

from __future__ import annotations

import codecs
import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rag_posfix.contracts.request import (
    MIN_LOGPROB,
    Chunk,
    FinishReason,
    Generation,
    GenerationRequest,
    MitigationChoice,
    Sampling,
    ScoredToken,
    TokenScore,
    TokenSource,
    Usage,
    named_stop,
)
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.question_scores import (
    AnswerText,
    AttributionTracker,
    can_attribute,
    check_finite,
    holds_one_each,
    not_finite_error,
    write_candidates,
)
from rag_posfix.generation.model.json_grammar import JsonText
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, forward_batches
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.prefill.per_passage import KVLookup
from rag_posfix.generation.prefill.prefill import prefill_calibrated
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Draft, Plan, RowScores
from rag_posfix.text import REPLACEMENT

# A full stop needs a space after it: "3.5" and "example.org" hold none. Chinese and Japanese sentences end without.
_END = re.compile(r"[.!?\u2026](?=\s)|[\u3002\uff01\uff1f\n]")
_WINDOW = 8
"""Tokens that are decoded at each step: a sentence end and the space after it are in neighbouring tokens."""


@dataclass(frozen=True, slots=True)
class FirstSentence:
    """The end of the first sentence of a growing answer. White space before the answer is no sentence.

    Attributes:
        decode: Tokens to text; None where there is no text, then the sentence never ends.
        last_tokens: The last ``_WINDOW`` tokens.
        has_ended: Whether a sentence has ended.
    """

    decode: Callable[[Sequence[int]], str] | None = None
    last_tokens: tuple[int, ...] = ()
    has_ended: bool = False

    def add(self, token: int) -> FirstSentence:
        """Return the state after one more token."""
        if self.decode is None or self.has_ended:
            return self
        tokens = (*self.last_tokens, token)[-_WINDOW:]
        return FirstSentence(self.decode, tokens, _END.search(self.decode(tokens).lstrip()) is not None)


class Session:
    """One prompt under one plan.

    Not for several threads at once; several sessions may share a model.

    Args:
        text: What ends a candidate answer.
        kv_lookup: The passage KV store, for keys and values that need not be computed again; None computes all.

    Attributes:
        batches: Their rows, in order, are the plan's rows.
        cached_tokens: Tokens of the prompt that ``kv_lookup`` returned, in any row.
    """

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        plan: Plan,
        text: AnswerText | None = None,
        kv_lookup: KVLookup | None = None,
    ) -> None:
        started = time.perf_counter()
        layout = plan.layout or layout
        self._plan, groups = prefill_calibrated(loaded, layout, plan, kv_lookup)
        reusable = (layout.suffix.start, *layout.turn_starts)[-1]
        self.cached_tokens = min(reusable, *(group.cached_tokens for group in groups))
        self.batches = [group.batch for group in groups]
        self._log_probs = torch.cat([group.logits.float() for group in groups]).log_softmax(dim=-1)  # (R, V)
        self._question = torch.cat([group.question for group in groups])
        self._answer = torch.zeros_like(self._question)
        self._confidence = self._log_probs.amax(dim=-1)
        self._attention = torch.cat([group.passage_shares for group in groups])  # (R, N)
        self._weights: Tensor | None = None
        self._attribution: AttributionTracker | None = None
        self._sentence = FirstSentence(text.decode if text and self._plan.tracks_sentence else None)
        if plan.draft is not None:
            self._weigh_rows(plan.draft, text or AnswerText())
        self.prefill_seconds = time.perf_counter() - started

    @property
    def can_share_pass(self) -> bool:
        """Whether its next token may share a pass with the next tokens of other sessions."""
        return all(batch.can_share_pass for batch in self.batches)

    @torch.inference_mode()
    def next_log_probs(self, allowed: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32.

        Args:
            allowed: Which tokens may be chosen, after the rows were combined; the scores of all others are -inf. Where
                the plan rules out all of them, they have the weighted mean of their rows' log-probabilities.

        Shapes:
            allowed: (at most V,) bool; tokens after its end are not allowed.
        """
        log_probs, weights = self._combine(self._log_probs, self._answer, self._sentence)
        if self._attribution is not None:
            self._attribution.weigh_rows(weights)
        if allowed is None:
            return log_probs
        excluded = functional.pad(~allowed, (0, log_probs.shape[0] - allowed.shape[0]), value=True)
        excluded = excluded.to(log_probs.device)
        masked = log_probs.masked_fill(excluded, float("-inf"))
        if bool(masked.isfinite().any()):
            return masked
        return (weights[:, None] * self._log_probs).sum(dim=0).masked_fill(excluded, float("-inf"))

    @torch.inference_mode()
    def attention(self) -> tuple[float, ...]:
        """Return each passage's share of the attention, rows weighted as the plan weights them. Sums to 1."""
        weights = self._combine(self._log_probs, self._answer, self._sentence)[1]
        mass = (weights[:, None] * self._attention).sum(dim=0)
        total, *shares = torch.cat((mass.sum()[None], mass)).tolist()  # read once
        return tuple(share / total for share in shares) if total > 0 else tuple(0.0 for _ in shares)

    @property
    def weighted(self) -> bool:
        """Whether the shares of ``attention`` are the weights of rows that hold one passage each."""
        return sum(batch.n_rows for batch in self.batches) > 1 and all(map(holds_one_each, self.batches))

    @torch.inference_mode()
    def attribute_tokens(self) -> None:
        """Track from now on which passages each token comes from. Call before the first token is chosen.

        No-op unless ``can_attribute``.
        """
        if self._attention.shape[1] and can_attribute(self.batches):
            self._attribution = AttributionTracker(self.batches, self._attention)

    def token_shares(self) -> list[tuple[float, ...]]:
        """Return each passage's share in every token whose log-probabilities were requested; empty if not tracked."""
        return [] if self._attribution is None else self._attribution.shares()

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next token's forward pass in each batch."""
        return [None] * len(self.batches) if self._attribution is None else self._attribution.observers()

    @torch.inference_mode()
    def advance(self, token_id: int) -> None:
        """Append a generated token to every row."""
        observers = self.observers()
        self.accept(token_id, self._read(self.batches, [token_id], observers)[:, -1], observers)

    @torch.inference_mode()
    def accept(self, token_id: int, logits: Tensor, observers: Sequence[Observer | None] = ()) -> None:
        """Append a generated token whose forward pass ran elsewhere.

        The session's own batches are not advanced: from then on every token must come this way.

        ``logits`` are (R, V), in the model's dtype, ``observers`` the ``observers()`` after the pass.
        """
        self._answer = self._answer + self._log_probs[:, token_id]
        self._sentence = self._sentence.add(token_id)
        self._log_probs = logits.float().log_softmax(dim=-1)
        if self._attribution is not None:
            self._attribution.take(observers)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each token of a given continuation; the session stays where it is.

        Cost: one forward pass over the continuation; a copy of the cache where layers do not keep all keys.

        Raises:
            ConfigError: the continuation is empty.
        """
        if not token_ids:
            raise ConfigError("cannot score an empty continuation; give at least one token")
        if len(token_ids) == 1:
            return self.score_from(token_ids, None)
        return self.score_from(token_ids, self._read([batch.branch() for batch in self.batches], token_ids[:-1]))

    @torch.inference_mode()
    def score_from(self, token_ids: Sequence[int], logits: Tensor | None) -> tuple[float, ...]:
        """Return what ``score`` returns, from the logits of a forward pass that ran elsewhere.

        Shapes:
            logits: (R, len(token_ids) - 1, V), those after each token but the last; None for a single token.
        """
        steps = [self._log_probs]
        if logits is not None:
            steps.extend(logits.float().log_softmax(dim=-1).unbind(dim=1))
        answer, sentence, scores = self._answer, self._sentence, []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(check_finite(float(self._combine(log_probs, answer, sentence)[0][token])))
            answer, sentence = answer + log_probs[:, token], sentence.add(token)
        return tuple(scores)

    @torch.inference_mode()
    def score_continuation(self, token_ids: Sequence[int]) -> Tensor:
        """Append tokens that were not chosen here; return the scores that the next token had before each, (n, V).

        Cost: one forward pass; memory for n rows of V scores, twice.
        """
        observers = self.observers()
        logits = self._read(self.batches, token_ids, observers)
        *steps, self._log_probs = (self._log_probs, *logits.float().log_softmax(dim=-1).unbind(dim=1))
        scores = []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(self._combine(log_probs, self._answer, self._sentence)[0])
            self._answer = self._answer + log_probs[:, token]
            self._sentence = self._sentence.add(token)
        if self._attribution is not None:
            self._attribution.take(observers)
        stacked = torch.stack(scores)
        check_finite(float(stacked.amax(dim=-1).sum()))
        return stacked

    def _read(
        self,
        batches: Sequence[SequenceBatch],
        tokens: Sequence[int],
        observers: Sequence[Observer | None] | None = None,
    ) -> Tensor:
        """Append tokens to every row. Returns (R, len(tokens), V)."""
        device = batches[0].loaded.device
        # A single token is written by the device itself; others are uploaded, once for all rows.
        uploaded = (
            torch.full((1, 1), tokens[0], device=device) if len(tokens) == 1 else torch.tensor([tokens], device=device)
        )
        ids = [uploaded.expand(batch.n_rows, -1) for batch in batches]
        return torch.cat(forward_batches(batches, ids, len(tokens), observers))

    def _weigh_rows(self, step: Draft, text: AnswerText) -> None:
        """Weigh the rows by the short answers that they write; rows of weight 0 are not read further."""
        candidates = write_candidates(self.batches, self._log_probs, self._question, step.max_tokens, text)
        weights = self.batches[0].loaded.spec.ranks.broadcast_decision(step.choose(candidates))
        is_kept = [weight > 0 for weight in weights.tolist()]  # read once
        counts = itertools.accumulate((batch.n_rows for batch in self.batches), initial=0)
        rows_of = [
            [row for row in range(stop - start) if is_kept[start + row]] for start, stop in itertools.pairwise(counts)
        ]
        self.batches = [
            batch if len(rows) == batch.n_rows else batch.select(rows)
            for batch, rows in zip(self.batches, rows_of, strict=True)
            if rows
        ]
        rows = torch.tensor([row for row, weight in enumerate(is_kept) if weight], device=weights.device)
        self._weights, self._log_probs, self._question = weights[rows], self._log_probs[rows], self._question[rows]
        self._answer, self._confidence = self._answer[rows], self._confidence[rows]
        self._attention = self._attention[rows]

    def _combine(self, log_probs: Tensor, answer: Tensor, sentence: FirstSentence) -> tuple[Tensor, Tensor]:
        if self._plan.combine is None:
            return log_probs[0], log_probs.new_ones(1)
        return self._plan.combine(
            RowScores(log_probs, self._question, answer, self._confidence, self._weights, not sentence.has_ended)
        )


def score_tokens(
    log_probs: Tensor, tokens: Sequence[int], starts: Sequence[int], n_top: int, data_of: Callable[[int], bytes]
) -> list[ScoredToken]:
    """Return tokens with their log-probabilities, in two reads from the device.

    Scores of rows that were combined need not sum to 1; the log-probabilities describe the combined distribution:
    log softmax of the scores.

    Args:
        starts: Characters before each token.
        n_top: Number of likeliest tokens, 0 for none.
        data_of: Returns the bytes of a token.

    Shapes:
        log_probs: (n, V) float32, the scores of all tokens at the position of each token.
    """
    normal = log_probs.log_softmax(dim=-1)
    best = normal.topk(min(n_top, normal.shape[-1]), dim=-1)
    chosen = normal.gather(1, torch.tensor(tokens, device=normal.device)[:, None])
    values = torch.cat((chosen, best.values), dim=1).tolist()
    rows = zip(tokens, starts, values, best.indices.tolist(), strict=True)
    return [
        ScoredToken(
            _score(token, value, data_of),
            start,
            tuple(_score(top_token, score, data_of) for top_token, score in zip(top_tokens, scores, strict=True)),
        )
        for token, start, (value, *scores), top_tokens in rows
    ]


def _score(token: int, log_prob: float, data_of: Callable[[int], bytes]) -> TokenScore:
    return TokenScore(data_of(token), max(log_prob, MIN_LOGPROB))


MAX_SCORE_ELEMENTS = 1 << 24
"""Scores that are held at the same time: 64 MiB in float32."""


def prefill_with_logprobs(
    open_session: Callable[[Layout, MitigationChoice, int, str], Session],
    request: GenerationRequest,
    data_of: Callable[[int], bytes],
) -> tuple[Session, list[ScoredToken]]:
    """Return the session that has read a request's prompt, and the tokens of the prompt with their log-probabilities.

    Formula: log p(t_i | t_0 ... t_{i-1}) for i >= 1; the first token has none.
    Cost: one pass over the prompt, in parts of ``MAX_SCORE_ELEMENTS`` scores; the output layer runs on every token.

    Raises:
        ConfigError: the prompt has passages.
        PromptTooLongError: prompt and answer exceed the context window.
    """
    layout, sampling = request.layout, request.sampling
    if layout.n_passages:
        raise ConfigError(
            f"prompt_scored needs a prompt without passages, and this one has {layout.n_passages}; leave them out"
        )
    first, remaining = layout.token_ids[:1], layout.token_ids[1:]
    session = open_session(Layout.plain(first), request.mitigation, len(remaining) + sampling.max_tokens, request.salt)
    starts = _starts([data_of(token) for token in layout.token_ids])
    scored = [ScoredToken(TokenScore(data_of(first[0]), None), 0)]
    step = max(1, MAX_SCORE_ELEMENTS // session.next_log_probs().shape[0])
    for start in range(0, len(remaining), step):
        tokens = remaining[start : start + step]
        log_probs = session.score_continuation(tokens)
        token_starts = starts[start + 1 : start + 1 + len(tokens)]
        scored += score_tokens(log_probs, tokens, token_starts, sampling.top_logprobs or 0, data_of)
    return session, scored


def _starts(token_bytes: Sequence[bytes]) -> list[int]:
    """Return the number of characters before each token's bytes. A character begins with its first byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, length = [], 0
    for data in token_bytes:
        starts.append(length)
        length += len(decoder.decode(data))
    return starts


class Sampler:
    """Chooses tokens for one answer. Seeded runs repeat on the same machine; no global random state is touched."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self.greedy = sampling.temperature == 0.0
        self._random = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, log_probs: Tensor) -> int:
        """Return a token id. Greedy takes the first of equals, so that a tie never depends on chance.

        Shapes:
            log_probs: (V,) float32.
        """
        if self.greedy:
            return _checked(log_probs.argmax().item(), log_probs.max().item())
        scores = log_probs.cpu().double()
        _checked(0, float(scores.max()))
        # The best score becomes 0: divided by a temperature close to 0 it stays finite.
        probabilities = self._filtered((scores - scores.max()) / self._sampling.temperature)
        return int(torch.multinomial(probabilities, 1, generator=self._random))

    def _filtered(self, scores: Tensor) -> Tensor:
        """Return probabilities with everything outside of top-k and top-p at 0."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if 0 < top_k < scores.shape[0]:
            dropped = scores.sort(descending=True, stable=True).indices[top_k:]
            scores = scores.index_fill(0, dropped, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if top_p < 1.0:
            ordered, index = probabilities.sort(descending=True, stable=True)
            # A token stays if the tokens ranked before it have not reached top_p: the most likely one always stays.
            dropped = index[ordered.cumsum(dim=-1) - ordered >= top_p]
            probabilities = probabilities.index_fill(0, dropped, 0.0)
        return probabilities / probabilities.sum()


def _checked(token: float, best: float) -> int:
    """Return the token; the largest score of a result that is not finite is not finite."""
    if not math.isfinite(best):
        raise not_finite_error(best)
    return int(token)


def choose_together(samplers: Sequence[Sampler], log_probs: Sequence[Tensor]) -> list[int]:
    """Return what each sampler chooses, in one read from the device, or two where some draw by chance.

    Shapes:
        log_probs: (V,) float32 each.
    """
    chosen: dict[int, int] = {}
    greedy = [i for i, sampler in enumerate(samplers) if sampler.greedy]
    if greedy:
        # Token and score in one read; ids of vocabularies are exact in float32.
        best = torch.stack(
            [torch.stack((row.argmax().float(), row.max())) for row in map(log_probs.__getitem__, greedy)]
        )
        chosen.update((i, _checked(*row)) for i, row in zip(greedy, best.tolist(), strict=True))
    drawn = [i for i in range(len(samplers)) if i not in chosen]
    if drawn:
        scores = torch.stack([log_probs[i] for i in drawn]).cpu()
        chosen.update((i, samplers[i].choose(row)) for i, row in zip(drawn, scores, strict=True))
    return [chosen[i] for i in range(len(samplers))]


class StopMatcher:
    """Matches several strings at once against a growing text, one character at a time.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977), for each string.
    Cost: a constant number of steps for each character and string, on average; no string may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # of each string, how long a beginning the text ends with
        self._length = 0

    @property
    def undecided(self) -> int:
        """How many characters at the end of the text may be the beginning of a string."""
        return max(self._matched, default=0)

    def push(self, chunk: str) -> int | None:
        """Return the start of the first string in the text that ``chunk`` completes, or None.

        Of several completed strings the first one counts. Nothing may be pushed after a match.
        """
        starts = [start for i in range(len(self._stops)) if (start := self._match_stop(i, chunk)) is not None]
        self._length += len(chunk)
        return min(starts, default=None)

    def _match_stop(self, index: int, chunk: str) -> int | None:
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        for offset, character in enumerate(chunk):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                return self._length + offset + 1 - matched
        self._matched[index] = matched
        return None


def _borders(text: str) -> list[int]:
    """Return for each end the length of the longest proper beginning of ``text`` that ends there."""
    borders = [0] * len(text)
    matched = 0
    for end in range(1, len(text)):
        while matched and text[matched] != text[end]:
            matched = borders[matched - 1]
        matched += text[matched] == text[end]
        borders[end] = matched
    return borders


_CONTEXT_TOKENS = 4
"""Tokens before a new one that are decoded with it: some decoders write a word differently at the start of a text."""


class TextStream:
    """Decodes one answer incrementally: full characters only, and nothing that may become a ``stop`` string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stop
        self._matcher = StopMatcher(stop)
        self._ids: list[int] = []
        # After how many tokens the text was complete, the last times. Tokens before the first are never decoded again:
        # some decoders lose a whole run of bytes that does not begin with a character.
        self._ends = deque([0], maxlen=_CONTEXT_TOKENS + 1)
        self._seen = 0  # characters of the text from there on that are in `text` already
        self._emitted = 0
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; check ``stopped`` afterwards."""
        self._ids.append(token_id)
        window = self._decode_window()
        if window.endswith(REPLACEMENT):  # half a character: wait for its other bytes
            return ""
        new = window[self._seen :]
        self._ends.append(len(self._ids))
        self._seen = len(self._decode_window())
        return self._emit(new, hold_back=True)

    def finish(self) -> str:
        """Return what was held back, without a character whose last bytes are missing. Call once, at the end."""
        held_back = "" if self.stopped else self._decode_window()[self._seen :]
        return self._emit(held_back.rstrip(REPLACEMENT), hold_back=False)

    def _decode_window(self) -> str:
        return self._decode(self._ids[self._ends[0] :])

    def _emit(self, new: str, hold_back: bool) -> str:
        self.text += new
        stop_start = None if self.stopped else self._matcher.push(new)
        if stop_start is not None:
            self.stop_string = min((s for s in self._stops if self.text.startswith(s, stop_start)), key=len)
            self.text = self.text[:stop_start]
        end = len(self.text) - (self._matcher.undecided if hold_back and not self.stopped else 0)
        certain = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return certain


class AnswerWriter:
    """Writes one answer. Runs no model: whoever holds the session hands in log-probabilities and advances it.

    Args:
        session: Has just read the request's prompt.
        prompt: The tokens of the prompt with their log-probabilities, if requested.
        json_text: The empty text of the request's JSON schema, if it is compiled already.

    Attributes:
        sampler: Chooses its tokens.
        done: Whether the answer is complete.
    """

    def __init__(
        self,
        encoder: Tokenizer,
        session: Session,
        request: GenerationRequest,
        prompt: Sequence[ScoredToken] = (),
        json_text: JsonText | None = None,
    ) -> None:
        self._encoder = encoder
        self._request = request
        self._prompt = tuple(prompt)
        self._session = session
        if request.attribution:
            session.attribute_tokens()
        self._eos_ids = encoder.eos_ids
        self._prefill_seconds = session.prefill_seconds
        self._attention = session.attention()
        self._cached_tokens = session.cached_tokens
        self.sampler = Sampler(request.sampling)
        self._text = TextStream(encoder.decode_answer, (*request.sampling.stop, *request.cues))
        schema = request.sampling.json_schema
        self._json = json_text if json_text or schema is None else encoder.json_grammars.begin(schema)
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._scored: list[ScoredToken] = []
        self._sent_characters = 0
        self._sent_tokens = 0
        self._finish: FinishReason = "length"
        self._started = time.perf_counter()
        self._seconds = 0.0
        self.done = False

    @property
    def last(self) -> int:
        return self._ids[-1]

    def next_log_probs(self) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32; -inf where the JSON schema rules it out."""
        if self._json is None:
            return self._session.next_log_probs()
        return self._session.next_log_probs(torch.frombuffer(bytearray(self._json.allowed()), dtype=torch.uint8) != 0)

    def write(self, log_probs: Tensor) -> Chunk:
        """Choose a token from (V,) log-probabilities and return the text that is certain now; then check ``done``."""
        return self.accept(self.sampler.choose(log_probs), log_probs)

    def accept(self, token: int, log_probs: Tensor) -> Chunk:
        """Take a token that ``sampler`` chose from ``log_probs``; return as ``write``."""
        n_top = self._request.sampling.top_logprobs
        if n_top is not None:
            start = len(self._text.text)
            self._scored += score_tokens(log_probs[None], [token], [start], n_top, self._encoder.token_bytes)
        self._ids.append(token)
        new = ""
        if token in self._eos_ids:
            self._finish, self.done = "stop", True
        else:
            new = self._text.push(token)
            self.done = self._text.stopped or len(self._ids) >= self._request.sampling.max_tokens
            if self._json is not None:
                self._json.append(token)
                if self._json.is_complete:
                    self._finish, self.done = "stop", True
        self._ends.append(len(self._text.text))
        self._seconds = time.perf_counter() - self._started
        return Chunk(new, log_probs=self._take_begun_tokens(new))

    def end(self) -> Chunk:
        """Return the text that was held back, with the whole answer. Call once, when ``done``."""
        held_back = self._text.finish()
        if self._text.stopped:  # a stop string may be in what was held back
            self._finish = "stop"
        generation = Generation(
            text=self._text.text,
            token_ids=tuple(self._ids),
            finish_reason=self._finish,
            usage=Usage(
                prompt_tokens=len(self._request.layout.token_ids),
                completion_tokens=len(self._ids),
                cached_tokens=self._cached_tokens,
            ),
            attention=self._attention,
            weighted=self._session.weighted,
            sources=self._sources(),
            timings={"prefill": self._prefill_seconds, "decode": self._seconds},
            log_probs=tuple(self._scored),
            prompt_log_probs=self._prompt,
            stop_string=named_stop(self._text.stop_string, self._request.sampling),
        )
        return Chunk(held_back, generation, tuple(self._scored[self._sent_tokens :]))

    def _take_begun_tokens(self, new: str) -> tuple[ScoredToken, ...]:
        """Return the tokens whose text begins in what was sent, and that were not returned before."""
        self._sent_characters += len(new)
        first = self._sent_tokens
        while self._sent_tokens < len(self._scored) and self._scored[self._sent_tokens].start < self._sent_characters:
            self._sent_tokens += 1
        return tuple(self._scored[first : self._sent_tokens])

    def _sources(self) -> tuple[TokenSource, ...]:
        """Return which passages each token comes from. The last one brings what was held back."""
        if not self._request.attribution:
            return ()
        written = len(self._text.text)
        ends = [min(end, written) for end in self._ends[:-1]] + [written]
        return tuple(TokenSource(end, shares) for end, shares in zip(ends, self._session.token_shares(), strict=False))
