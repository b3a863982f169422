// The conversation: turns over passages of the page, of the served index or of a collection.

import { toDocument } from "./service.js";

export const PAGE = "page";
export const INDEX = "index";

export function newTurn(number, question, source) {
  return { number, question, source, text: "", query: "", cache: "", sources: [], warnings: [], error: "", busy: true };
}

/** The body of a follow-up: every answered turn before it is its history. */
export function turnBody(turns, question, source, passages) {
  const answered = turns.filter((turn) => turn.text && !turn.error);
  const history = answered.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.text },
  ]);
  const body = {
    model: "default",
    messages: [...history, { role: "user", content: question }],
    max_tokens: 64,
    temperature: 0,
    stream_options: { include_usage: true },
    posfix: { mitigation: "default" },
  };
  if (source === PAGE) return { ...body, documents: passages.map(toDocument) };
  if (source !== INDEX) body.posfix.collection = source;
  return body;
}

/** Take a chunk of the stream; the last ones have sources and usage. */
export function takeTurn(turn, chunk) {
  turn.text += chunk.choices?.[0]?.delta?.content ?? "";
  if (chunk.documents) {
    if (turn.source !== PAGE) turn.query = chunk.query.split("\n").join(" / ");
    turn.warnings = chunk.warnings ?? [];
    turn.sources = chunk.documents.map((one) => ({ id: one.id, name: sourceName(one) }));
  }
  if (chunk.cached) turn.cache = "the answer is from the cache";
  else if (chunk.usage && !turn.cache) {
    const cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    turn.cache = `${cached} of ${chunk.usage.prompt_tokens} tokens of the prompt were cached`;
  }
}

function sourceName(document) {
  const page = document.page === null ? "" : `page ${document.page}`;
  return [document.title || document.id, document.source, page].filter(Boolean).join(", ");
}
