// Passages as cards: from pasted text, from an example, from a search.

export const MOST_PASSAGES = 50;

/** A passage from a document {id, title, source, page, text, score}; place says which letter it gets for good. */
export function toPassage(document, place) {
  const text = String(document.text ?? "");
  const heading = document.title ? String(document.title) : "";
  const page = document.page ? `page ${document.page}` : "";
  const file = document.source ? document.source.split(/[\\/]/u).pop() : "";
  const title = [heading, file, page].filter(Boolean).join(", ") || firstWords(text);
  const id = document.id === undefined || document.id === null ? `passage-${place + 1}` : String(document.id);
  const score = typeof document.score === "number" ? document.score : null;
  return { id, heading, title, text, score, label: letter(place), attention: {} };
}

/** Passages from text: blocks with an empty line between them. */
export function parsePasted(text) {
  const blocks = text.split(/\n[ \t]*\n/u).map((block) => block.trim());
  return blocks.filter(Boolean).map((block) => ({ text: block }));
}

/** Documents with different ids: cards are told apart by them. */
export function distinct(documents) {
  const seen = new Set();
  return documents.map(toPassage).filter((passage) => !seen.has(passage.id) && seen.add(passage.id));
}

function firstWords(text) {
  const words = text.split(/\s+/u).slice(0, 6).join(" ");
  return words.length < text.trim().length ? `${words} …` : words;
}

/** A, B, ... Z, AA, AB, ... */
function letter(place) {
  const rest = Math.floor(place / 26);
  return (rest ? letter(rest - 1) : "") + String.fromCharCode(65 + (place % 26));
}

/** A copy of `list` with the entry at `from` moved to `to`. */
export function movedTo(list, from, to) {
  const moved = [...list];
  moved.splice(to, 0, ...moved.splice(from, 1));
  return moved;
}

/** A copy in another order, unless there is one order only. */
export function shuffled(list) {
  for (;;) {
    const other = [...list];
    for (let i = other.length - 1; i > 0; i -= 1) {
      const j = Math.floor(Math.random() * (i + 1));
      [other[i], other[j]] = [other[j], other[i]];
    }
    if (list.length < 2 || other.some((one, i) => one !== list[i])) return other;
  }
}
