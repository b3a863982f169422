// One column of answers: asks, keeps what is written, and compares it with the last order and the other column.

import { changedSpans, citedSpans, segmentsOf } from "./words.js";

/** What is said of an answer by its field `support`; nothing where nobody judged. */
const SUPPORT = { yes: "supported by the passages", partly: "partly supported", no: "not supported by any passage" };

export function newColumn(name, title, subtitle) {
  return { name, title, subtitle, ...empty(), last: null };
}

function empty() {
  return {
    state: "empty", // empty, waiting, writing, done, failed
    busy: false,
    text: "",
    error: "",
    citations: [],
    segments: [],
    removed: [],
    sources: [],
    verdict: "",
    facts: "",
    warnings: [],
    shares: {},
    documents: [],
    weighted: false, // shares are weights of experts that read one passage each, not attention
  };
}

/** Before an answer begins. `moved` says whether only the order has changed since the last answer. */
export function begin(column, moved) {
  const last = moved && column.state === "done" ? column.text : moved ? column.last : null;
  Object.assign(column, empty(), { last, state: "waiting", busy: true });
}

/** Take a chunk of the stream; the last one has the sources. */
export function take(column, chunk) {
  const piece = chunk.choices?.[0]?.delta?.content;
  if (piece) {
    column.text += piece;
    column.state = "writing";
    column.segments = segmentsOf(column.text, {});
  }
  if (chunk.documents) {
    column.documents = chunk.documents;
    column.citations = chunk.citations ?? [];
    column.warnings = chunk.warnings ?? [];
    column.weighted = chunk.documents.some((one) => (one.weight ?? null) !== null);
    column.shares = Object.fromEntries(chunk.documents.map((one) => [one.id, shareOf(one)]));
    const seconds = Object.values(chunk.timings ?? {}).reduce((sum, one) => sum + one, 0);
    const time = chunk.cached ? "from the cache" : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const said = chunk.grounded === false && !chunk.documents.length ? "the service's own text: no model was asked" : SUPPORT[chunk.support];
    column.facts = [time, said].filter(Boolean).join(", ");
  }
}

/** The weight of a document of an answer, or its share of the attention where the method has no weights. */
export function shareOf(document) {
  return document?.weight ?? document?.attention ?? 0;
}

export function finish(column) {
  Object.assign(column, { state: "done", busy: false });
  if (!column.text) column.text = "(no text)";
}

export function fail(column, error) {
  Object.assign(column, { state: "failed", busy: false, error: error.message, segments: [] });
}

/** Mark the words that changed since the last order, those that the other column does not have, and the citations. */
export function compare(column, other, named) {
  if (column.state !== "done") return;
  const marked = {};
  if (column.last !== null && column.last !== column.text) {
    marked.changed = changedSpans(column.text, column.last);
    column.removed = segmentsOf(column.last, { removed: changedSpans(column.last, column.text) });
  }
  if (other.state === "done") marked.differs = changedSpans(column.text, other.text);
  const cited = citedSpans(column.text, column.citations);
  column.segments = segmentsOf(column.text, marked, cited);
  column.verdict = verdict(column);
  const ids = [...new Set(cited.flatMap((span) => span.ids))];
  column.sources = ids.map(named).filter((one) => one !== null);
}

function verdict(column) {
  if (column.last === null) return "";
  return column.last === column.text ? "Unchanged by the move." : "Changed by the move.";
}
