// Words of answers: what changed from one to another, and the pieces that an answer is shown in.

/** The words of a text as {text, start, end}; white space belongs to none. */
export function wordsOf(text) {
  return Array.from(text.matchAll(/\S+/gu), (found) => ({
    text: found[0],
    start: found.index,
    end: found.index + found[0].length,
  }));
}

/**
 * The spans of `text` whose words are not in `other`, by a longest common subsequence of words.
 * Words are compared exactly. Time and memory: words of `text` times words of `other`.
 */
export function changedSpans(text, other) {
  const ours = wordsOf(text);
  const theirs = wordsOf(other);
  // common[i][j]: length of the longest common subsequence of ours[i..] and theirs[j..].
  const common = Array.from({ length: ours.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = ours.length - 1; i >= 0; i -= 1) {
    for (let j = theirs.length - 1; j >= 0; j -= 1) {
      common[i][j] =
        ours[i].text === theirs[j].text
          ? common[i + 1][j + 1] + 1
          : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const spans = [];
  let j = 0;
  for (let i = 0; i < ours.length; i += 1) {
    while (j < theirs.length && theirs[j].text !== ours[i].text && common[i][j + 1] >= common[i + 1][j]) j += 1;
    if (j < theirs.length && theirs[j].text === ours[i].text) j += 1;
    else append(spans, ours[i], text);
  }
  return spans;
}

function append(spans, word, text) {
  const last = spans.at(-1);
  // Neighbouring words are one span, the space between them included.
  if (last !== undefined && text.slice(last.end, word.start).trim() === "") last.end = word.end;
  else spans.push({ start: word.start, end: word.end });
}

/** Offsets in code points, as the service counts, as spans in UTF-16 units, as JavaScript counts. */
export function citedSpans(text, citations) {
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  const last = units.length - 1;
  return citations.map((one) => ({
    start: units[Math.min(one.start, last)],
    end: units[Math.min(one.end, last)],
    ids: one.document_ids,
  }));
}

/**
 * `text` cut at the borders of all spans. Each piece has its text, its CSS classes, and the documents that it cites.
 * `marked` maps a class to its spans.
 */
export function segmentsOf(text, marked, cited = []) {
  const borders = new Set([0, text.length]);
  for (const span of [...Object.values(marked).flat(), ...cited]) borders.add(span.start).add(span.end);
  const sorted = [...borders].sort((a, b) => a - b);
  const pieces = [];
  for (let i = 0; i + 1 < sorted.length; i += 1) {
    const [start, end] = [sorted[i], sorted[i + 1]];
    const covers = (span) => span.start <= start && end <= span.end;
    const classes = Object.keys(marked).filter((name) => marked[name].some(covers));
    const ids = [...new Set(cited.filter(covers).flatMap((span) => span.ids))];
    if (ids.length) classes.push("cited");
    pieces.push({ start, text: text.slice(start, end), style: classes.join(" "), cited: ids });
  }
  return pieces;
}

/** Whether an answer contains one of the accepted answers, white space and case left out; null without any. */
export function isRight(answer, accepted) {
  const plain = (text) => text.toLowerCase().split(/\s+/u).join(" ").trim();
  const wanted = accepted.split(";").map(plain).filter(Boolean);
  return wanted.length ? wanted.some((one) => plain(answer).includes(one)) : null;
}
