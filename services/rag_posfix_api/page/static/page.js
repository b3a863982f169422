// The page: its state and what a user can do. Everything is shown as text; nothing is written as HTML.

import Alpine from "./vendor/alpine-csp.esm.min.js";
import { begin, compare, fail, finish, newColumn, shareOf, take } from "./column.js";
import { INDEX, newTurn, PAGE, takeTurn, turnBody } from "./conversation.js";
import { copyText, LANGUAGES } from "./copies.js";
import { drawCurve } from "./curve.js";
import { distinct, MOST_PASSAGES, movedTo, parsePasted, shuffled } from "./passages.js";
import { chatBody, Service, toDocument } from "./service.js";
import { isRight } from "./words.js";

const AGAIN_MS = 400; // several moves in a row are asked once
const LOADING_MS = 1500;
const FIRST_SHOWN = 3; // passages; page.css hides the others

function page() {
  return {
    served: "Connecting …",
    ready: false,
    needsKey: false,
    key: "",
    keyProblem: "",
    showsAll: false, // or only the first passages
    problem: "",
    told: "",
    question: "",
    accepted: "",
    gold: "",
    passages: [],
    panel: "",
    pasted: "",
    collections: [],
    collection: "",
    k: 8,
    columns: [
      newColumn("none", "Unmodified", "the model as trained"),
      newColumn("default", "Order-invariant", "with the default method"),
    ],
    asksAgain: true,
    asked: "", // question and passages of the last answers, whatever their order
    hasAttention: false,
    lit: [],
    points: [],
    turns: [],
    converses: false, // or compares two answers
    sample: "", // a question that the served index answers
    source: PAGE,
    hasIndex: false,
    fromIndex: false, // passages are retrieved from the served index for each question
    retrievedFor: null, // the question that the passages were retrieved for
    talk: null, // the request of the conversation that is running
    trying: false,
    languages: LANGUAGES,
    language: "",
    copied: false,
    running: null,
    timer: null,
    service: null,

    get busy() {
      return this.columns.some((column) => column.busy);
    },
    get asksKey() {
      return this.needsKey && !this.ready;
    },
    get collapsed() {
      return !this.showsAll && this.passages.length > FIRST_SHOWN;
    },
    get listStyle() {
      return { collapsed: this.collapsed };
    },
    get moreName() {
      return `Show all ${this.passages.length} passages`;
    },
    get settled() {
      return this.columns.some((column) => column.state === "done");
    },
    get marks() {
      return this.shows("changed");
    },
    get differs() {
      return this.shows("differs");
    },
    get quotes() {
      return this.shows("cited");
    },
    get measured() {
      return this.hasAttention && this.passages.some((one) => one.attention.none !== undefined);
    },
    get code() {
      if (!this.language) return "";
      const address = new URL(".", window.location.href).href.replace(/\/$/u, "");
      const question = this.question || (this.turns.at(-1)?.question ?? "");
      const body = chatBody(question, this.fromIndex ? null : this.passages, "default");
      return copyText(this.language, address, body, this.needsKey);
    },
    get hidesText() {
      return this.fromIndex && this.passages.some((one) => !one.text);
    },
    get placeholder() {
      if (this.converses && this.turns.length) return "Ask on";
      return this.fromIndex ? "Ask your documents" : "";
    },
    get suggests() {
      return this.fromIndex && Boolean(this.sample) && !this.question && !(this.converses && this.turns.length);
    },
    get readsPassages() {
      return !this.converses || this.source === PAGE;
    },
    get nothingFound() {
      return this.fromIndex && this.settled && !this.passages.length;
    },

    // Start

    async init() {
      this.service = new Service(() => this.key);
      sortableList(this.$refs.list, () => this.passages, (from, to) => this.move(from, to));
      await this.loadExample();
      await this.connect();
    },

    async connect() {
      try {
        const facts = await this.service.facts();
        if (!facts.ready) {
          this.served = "The model is being loaded …";
          setTimeout(() => this.connect(), LOADING_MS);
          return;
        }
        this.hasAttention = facts.attention;
        this.needsKey = facts.key;
        if (facts.index && !this.hasIndex) this.useIndex();
        this.hasIndex = facts.index;
        if (facts.key && !this.key) {
          this.served = "This service needs an API key.";
          return;
        }
        const models = await this.service.json("v1/models");
        this.served = models.data[0].id;
        this.ready = true;
        if (facts.index) this.sample = (await this.service.json("v1/posfix/sample")).question ?? "";
        this.collections = (await this.service.json("v1/collections")).data.map((one) => one.name);
        this.collection = this.collections[0] ?? "";
      } catch (error) {
        this.refused(error);
        if (!this.asksKey) this.served = error.message;
      }
    },

    useKey() {
      this.problem = "";
      this.keyProblem = "";
      return this.connect();
    },

    /** Ask for the key again if the service does not take it, such as one that was revoked meanwhile. */
    refused(error) {
      if (error.status !== 401) return;
      this.needsKey = true;
      this.ready = false;
      this.served = "This service needs an API key.";
      this.keyProblem = this.key ? "The service does not accept this key." : "";
    },

    // Passages

    async loadExample() {
      const example = await this.service.json("page/example.json");
      this.question = example.question;
      this.accepted = example.answers.join("; ");
      this.replace(example.documents, example.gold);
    },

    useIndex() {
      this.question = "";
      this.accepted = "";
      this.replace([]);
      this.source = INDEX;
      this.fromIndex = true;
    },

    takeSample() {
      this.question = this.sample;
      document.getElementById("question").focus();
    },

    usePasted() {
      const documents = parsePasted(this.pasted);
      if (documents.length) this.replace(documents);
    },

    async search() {
      this.problem = "";
      try {
        const path = `v1/collections/${encodeURIComponent(this.collection)}/search`;
        const found = await this.service.json(path, { query: this.question, k: this.k });
        this.replace(found.data);
      } catch (error) {
        this.problem = error.message;
      }
    },

    replace(documents, gold) {
      this.stop();
      this.problem =
        documents.length > MOST_PASSAGES
          ? `${documents.length} passages were given; the first ${MOST_PASSAGES} are shown.`
          : "";
      this.fromIndex = false;
      this.source = PAGE;
      this.retrievedFor = null;
      this.passages = distinct(documents.slice(0, MOST_PASSAGES));
      this.gold = gold ?? this.passages[0]?.id ?? "";
      this.panel = "";
      this.showsAll = false;
      this.points = [];
      this.columns.forEach((column) => Object.assign(column, newColumn(column.name, column.title, column.subtitle)));
      this.asked = "";
      this.say(`${this.passages.length} passages.`);
    },

    shuffle() {
      this.reorder(shuffled(this.passages));
      this.say("Passages shuffled.");
    },

    move(from, to) {
      if (to < 0 || to >= this.passages.length || from === to) return;
      const passage = this.passages[from];
      if (to >= FIRST_SHOWN) this.showsAll = true;
      this.reorder(movedTo(this.passages, from, to));
      this.say(`Passage ${passage.label} is now at place ${to + 1} of ${this.passages.length}.`);
    },

    press(event, place) {
      const last = this.passages.length - 1;
      const to = { ArrowUp: place - 1, ArrowDown: place + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const handle = event.currentTarget;
      this.move(place, to);
      // Its card may have been moved in the document, which takes the focus away.
      this.$nextTick(() => handle.focus());
    },

    reorder(passages) {
      this.passages = passages;
      if (!this.asked || !this.asksAgain || this.hidesText) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), AGAIN_MS);
    },

    // Answers

    submit() {
      return this.converses ? this.send() : this.ask();
    },

    async ask() {
      if (!this.ready || !this.question.trim()) return;
      this.stop();
      this.problem = "";
      const run = (this.running = new AbortController());
      const retrieves = this.fromIndex && (this.hidesText || this.retrievedFor !== this.question);
      const moved = !retrieves && this.askedNow() === this.asked;
      this.columns.forEach((column) => begin(column, moved));
      const passages = retrieves ? null : [...this.passages];
      if (retrieves) this.retrievedFor = null;
      else this.asked = this.askedNow();
      const filled = this.columns.map((column) => this.fill(column, passages, run));
      if (retrieves) await Promise.allSettled(filled);
      if (!run.signal.aborted && !this.hidesText) await this.attend([...this.passages], run);
      await Promise.all(filled);
    },

    askedNow() {
      return JSON.stringify([this.question, this.passages.map((one) => one.id).sort()]);
    },

    /** Show the passages that the service retrieved for the question; both columns read the same. */
    retrieved(documents) {
      if (this.retrievedFor === this.question) return;
      this.retrievedFor = this.question;
      this.passages = distinct(documents);
      this.gold = this.passages[0]?.id ?? "";
      this.points = [];
      this.asked = this.askedNow();
      this.say(`${this.passages.length} passages of the served index.`);
    },

    async fill(column, passages, run) {
      try {
        for await (const chunk of this.service.chat(chatBody(this.question, passages, column.name), run.signal)) {
          take(column, chunk);
        }
        finish(column);
        if (passages === null) this.retrieved(column.documents);
        if (column.name === "default") this.shared("default", column.shares);
      } catch (error) {
        if (run.signal.aborted) return;
        this.refused(error);
        fail(column, error);
      }
      const [none, free] = this.columns;
      compare(none, free, (id) => this.named(id));
      compare(free, none, (id) => this.named(id));
    },

    /** The bars of the unmodified model, measured before it answers. */
    async attend(passages, run) {
      if (!this.hasAttention || !passages.length) return;
      const body = { query: this.question, documents: passages.map(toDocument), order: "original" };
      try {
        const found = await this.service.json("v1/posfix/attention", body, run.signal);
        this.shared("none", Object.fromEntries(found.documents.map((one) => [one.id, one.attention])));
      } catch (error) {
        if (error.code === "unsupported") this.hasAttention = false;
      }
    },

    shared(name, shares) {
      this.passages.forEach((one) => {
        one.attention = { ...one.attention, [name]: shares[one.id] ?? 0 };
      });
    },

    // Conversation

    converse(converses) {
      this.converses = converses;
    },

    get origins() {
      const origins = [{ value: PAGE, name: "the passages of this page" }];
      if (this.hasIndex) origins.push({ value: INDEX, name: "the served index" });
      return [...origins, ...this.collections.map((name) => ({ value: name, name: `collection ${name}` }))];
    },

    async send() {
      const question = this.question.trim();
      if (!this.ready || !question || this.talk) return;
      const body = turnBody(this.turns, question, this.source, this.passages);
      this.turns.push(newTurn(this.turns.length + 1, question, this.source));
      const turn = this.turns.at(-1);
      this.question = "";
      const run = (this.talk = new AbortController());
      try {
        for await (const chunk of this.service.chat(body, run.signal)) takeTurn(turn, chunk);
        this.say(`Answer ${turn.number}: ${turn.text}`);
      } catch (error) {
        if (!run.signal.aborted) this.refused(error);
        if (!run.signal.aborted || !turn.text) turn.error = run.signal.aborted ? "Stopped." : error.message;
      }
      turn.busy = false;
      if (this.talk === run) this.talk = null;
    },

    forget() {
      this.talk?.abort();
      this.talk = null;
      this.turns = [];
      this.say("A new conversation.");
    },

    /** Stop what is being written; what was written stays. */
    cease() {
      this.stop();
      this.talk?.abort();
      this.columns.forEach((column) => column.busy && (column.text ? finish(column) : fail(column, new Error("Stopped."))));
      this.say("Stopped.");
    },

    expand() {
      this.showsAll = true;
    },

    stop() {
      clearTimeout(this.timer);
      this.running?.abort();
      this.trying = false;
    },

    // Every place

    async tryPlaces() {
      if (this.trying) {
        this.stop();
        return;
      }
      this.stop();
      this.problem = "";
      const gold = this.passages.findIndex((one) => one.id === this.gold);
      if (gold < 0 || isRight("", this.accepted) === null) {
        this.problem = "Choose the passage that holds the answer, and type an accepted answer.";
        return;
      }
      const run = (this.running = new AbortController());
      this.columns.forEach((column) => column.busy && fail(column, new Error("Stopped.")));
      this.trying = true;
      this.points = [];
      for (let place = 0; place < this.passages.length && !run.signal.aborted; place += 1) {
        await this.tryPlace(movedTo(this.passages, gold, place), place + 1, run);
      }
      if (this.running === run) this.trying = false;
      if (!run.signal.aborted) this.say("Every place has been tried.");
    },

    async tryPlace(passages, place, run) {
      const point = { place, none: null, default: null };
      this.points.push(point);
      const kept = this.points.at(-1);
      await Promise.all(this.columns.map(({ name }) => this.tryColumn(kept, name, passages, run)));
    },

    async tryColumn(point, name, passages, run) {
      try {
        const body = chatBody(this.question, passages, name);
        const answer = await this.service.json("v1/chat/completions", body, run.signal);
        const text = answer.choices[0].message.content;
        const share = shareOf(answer.documents.find((one) => one.id === this.gold));
        point[name] = { text, right: isRight(text, this.accepted) === true, share };
        drawCurve(document.getElementById("curve"), this.points, this.passages.length, this.hasAttention);
      } catch (error) {
        if (run.signal.aborted) return;
        this.refused(error);
        this.problem = error.message;
        run.abort();
      }
    },

    // Programs

    choose(name) {
      this.language = this.language === name ? "" : name;
      this.copied = false;
    },

    async copy() {
      this.copied = await copied(this.code);
      this.say(this.copied ? "Copied." : "Select the text and copy it.");
      setTimeout(() => (this.copied = false), 2000);
    },

    // What the page says

    say(text) {
      this.told = text;
    },
    toggle(panel) {
      this.panel = this.panel === panel ? "" : panel;
    },
    named(id) {
      const passage = this.passages.find((one) => one.id === id);
      return passage ? { id, label: passage.label, name: `Passage ${passage.label}: ${passage.title}` } : null;
    },
    light(ids) {
      this.lit = ids;
    },
    show(id) {
      const card = [...this.$refs.list.children].find((one) => one.dataset?.id === id);
      if (this.passages.findIndex((one) => one.id === id) >= FIRST_SHOWN) this.showsAll = true;
      this.$nextTick(() => card?.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" }));
    },
    shows(style) {
      return this.columns.some((column) => column.segments.some((one) => one.style.split(" ").includes(style)));
    },
    cardStyle(passage) {
      return { lit: this.lit.includes(passage.id) };
    },
    handleName(passage, place) {
      return `Move passage ${passage.label}, ${passage.title}, place ${place + 1} of ${this.passages.length}`;
    },
    upName(passage) {
      return `Move passage ${passage.label} up`;
    },
    downName(passage) {
      return `Move passage ${passage.label} down`;
    },
    optionName(passage) {
      return `${passage.label}  ${passage.title}`;
    },
    barStyle(share) {
      return { width: `${100 * (share ?? 0)}%` };
    },
    barName(name, share, measure) {
      return `${name}: ${this.percent(share)} of the ${measure}`;
    },
    /** What the bars of the default method are: its experts have weights, other methods attend. */
    get measure() {
      return this.columns[1].weighted ? "weights" : "attention";
    },
    percent(share) {
      return share === undefined ? "" : `${Math.round(100 * share)} %`;
    },
    cell(answer) {
      return answer === null ? "…" : answer.text;
    },
    wrongStyle(answer) {
      return answer !== null && !answer.right ? "wrong" : "";
    },
  };
}

function calm() {
  return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** Write to the clipboard; a page that did not come over HTTPS or from this machine has to select and copy. */
async function copied(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  window.getSelection().selectAllChildren(document.getElementById("code"));
  return document.execCommand("copy");
}

/**
 * Cards that can be dragged. Sortable moves elements of the document; they are put back, and the list is changed in
 * the state instead, so that one of the two owns the order.
 */
function sortableList(list, passages, move) {
  return window.Sortable.create(list, {
    draggable: ".card",
    handle: ".handle",
    forceFallback: true, // the same with a mouse and a finger
    fallbackOnBody: true,
    animation: calm() ? 0 : 120,
    ghostClass: "held",
    onStart(event) {
      // The copy is not under the pointer; it shows as much text as its card, whose height it has.
      const [card, copy] = [event.item, window.Sortable.ghost].map((one) => one.querySelector(".passage-text"));
      window.Sortable.ghost.classList.toggle("open", card.clientHeight > copy.clientHeight);
    },
    onEnd(event) {
      const cards = new Map([...list.querySelectorAll(".card")].map((card) => [card.dataset.id, card]));
      list.append(...passages().map((one) => cards.get(one.id)));
      move(event.oldDraggableIndex, event.newDraggableIndex);
    },
  });
}

// The card under the pointer is a copy: its expressions have no passage, and it changes nothing.
Alpine.interceptInit((element, skip) => {
  if (element.classList?.contains("sortable-fallback")) {
    element._x_ignore = true;
    skip();
  }
});
Alpine.data("page", page);
Alpine.start();
