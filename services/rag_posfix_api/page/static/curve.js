// The curve by place, as SVG: whether each answer is right, and the share of the passage that holds the answer.

const NAMES = { none: "unmodified", default: "order-invariant" };
const WIDTH = 640;
const LEFT = 92;
const RIGHT = 20;

/** Draws the points [{place, none, default}] of `count` places into `host`; a column is {right, share} or null. */
export function drawCurve(host, points, count, withAttention) {
  const top = 30;
  const height = withAttention ? 290 : 140;
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", class: "curve" });
  svg.append(make("title", {}, summary(points)));
  legend(svg);
  const x = (place) => (count === 1 ? WIDTH / 2 : LEFT + ((place - 1) * (WIDTH - LEFT - RIGHT)) / (count - 1));
  const verdicts = { top: top + 20, bottom: top + 80, labels: [[1, "right"], [0, "wrong"]] };
  panel(svg, points, x, verdicts, (answer) => (answer.right ? 1 : 0));
  let bottom = verdicts.bottom;
  if (withAttention) {
    const shares = { top: top + 130, bottom: top + 220, labels: [[1, "100 %"], [0.5, "share"], [0, "0"]] };
    panel(svg, points, x, shares, (answer) => answer.share);
    bottom = shares.bottom;
  }
  for (let place = 1; place <= count; place += 1) {
    svg.append(make("text", { x: x(place), y: bottom + 22, class: "tick", "text-anchor": "middle" }, String(place)));
  }
  svg.append(make("text", { x: LEFT - 14, y: bottom + 22, class: "tick", "text-anchor": "end" }, "place"));
  host.replaceChildren(svg);
}

function panel(svg, points, x, scale, value) {
  const y = (share) => scale.bottom - share * (scale.bottom - scale.top);
  for (const [share, label] of scale.labels) {
    svg.append(make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(share), y2: y(share), class: "grid" }));
    svg.append(make("text", { x: LEFT - 14, y: y(share) + 4, class: "tick", "text-anchor": "end" }, label));
  }
  for (const name of ["default", "none"]) {
    const known = points.filter((point) => point[name] !== null);
    const at = known.map((point) => [x(point.place), y(value(point[name]))]);
    svg.append(make("polyline", { points: at.map((pair) => pair.join(",")).join(" "), class: `line ${name}` }));
    for (const [cx, cy] of at) svg.append(make("circle", { cx, cy, r: name === "none" ? 4 : 6, class: `dot ${name}` }));
  }
}

function legend(svg) {
  let left = LEFT;
  for (const name of ["none", "default"]) {
    svg.append(make("circle", { cx: left + 6, cy: 12, r: name === "none" ? 4 : 6, class: `dot ${name}` }));
    svg.append(make("text", { x: left + 20, y: 16, class: "name" }, NAMES[name]));
    left += 130;
  }
}

/** The curve in words. */
export function summary(points) {
  return ["none", "default"]
    .map((name) => {
      const asked = points.filter((point) => point[name] !== null);
      const right = asked.filter((point) => point[name].right).map((point) => point.place);
      return `${NAMES[name]}: right at ${right.length} of ${asked.length} places${right.length ? ` (${right.join(", ")})` : ""}`;
    })
    .join("; ");
}

function make(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
