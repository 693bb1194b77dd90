"use strict";
// Sorting, filtering and the timeline.  Whatever comes from data is set as text, never as markup.

function cellValue(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
}

// Numbers first, in order; then texts (what failed, dashes), in order, whichever way the numbers go.
function compare(a, b, sign) {
  const numbers = [typeof a === "number", typeof b === "number"];
  if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
  return numbers[0] ? sign * (a - b) : sign * (a < b ? -1 : a > b ? 1 : 0);
}

function sortBy(button) {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const ascending = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = Array.from(body.rows, (row, i) => [cellValue(row, head.cellIndex), i, row]);
  rows.sort((a, b) => compare(a[0], b[0], ascending ? 1 : -1) || a[1] - b[1]);
  body.append(...rows.map((r) => r[2]));
}

// Every word must occur somewhere in the row.
function filter(input) {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const body = input.closest("section").querySelector("tbody");
  let shown = 0;
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += row.hidden ? 0 : 1;
  }
  input.closest(".tools").querySelector("output").value = `${shown} of ${body.rows.length} rows`;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("th button");
  if (button) sortBy(button);
});
document.addEventListener("input", (event) => {
  if (event.target.matches("input.filter")) filter(event.target);
});

const SVG = "http://www.w3.org/2000/svg", LEFT = 70, TOP = 8;

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

function timeline(box) {
  const picture = box.querySelector("svg"), said = box.querySelector("output"), pick = box.querySelector("select");
  let spans = [], end = 1, from = 0, to = 1;

  function draw() {
    const width = picture.clientWidth || 900, height = picture.clientHeight || 320;
    const devices = [...new Set(spans.map((s) => s[0]))].sort((a, b) => a - b);
    const lane = (height - TOP - 30) / Math.max(devices.length, 1), scale = (width - LEFT - 10) / (to - from);
    const drawn = [];
    for (const [stage, kind, microBatch, start, length] of spans) {
      const left = Math.max(start, from), right = Math.min(start + length, to);
      if (right <= left) continue;
      const x = LEFT + (left - from) * scale, w = (right - left) * scale;
      const y = TOP + devices.indexOf(stage) * lane;
      // What lies within another span is drawn lower, so that both are seen.
      const inner = kind === "recompute" ? 0.25 * lane : 0;
      const bar = element("rect", { class: kind, x, y: y + 2 + inner, width: Math.max(w, 0.5), height: Math.max(lane - 6 - inner, 1) });
      const which = microBatch < 0 ? "" : ` of micro-batch ${microBatch}`;
      bar.append(element("title", {}, `stage ${stage}: ${kind}${which}, ${(start / 1000).toFixed(3)} to ${((start + length) / 1000).toFixed(3)} ms`));
      drawn.push(bar);
      if (microBatch >= 0 && w > 14) drawn.push(element("text", { class: "n", x: x + w / 2 - 3, y: y + lane / 2 + 3 }, String(microBatch)));
    }
    devices.forEach((d, i) => drawn.push(element("text", { x: 4, y: TOP + i * lane + lane / 2 + 4 }, `stage ${d}`)));
    for (let i = 0; i <= 5; i++) {
      const at = from + ((to - from) * i) / 5;
      drawn.push(element("text", { x: LEFT + (at - from) * scale - 14, y: height - 8 }, `${(at / 1000).toFixed(2)}`));
    }
    picture.replaceChildren(...drawn);
    said.value = `${(from / 1000).toFixed(3)} to ${(to / 1000).toFixed(3)} of ${(end / 1000).toFixed(3)} ms`;
  }

  function view(start, length) {
    length = Math.min(Math.max(length, end / 10000), end);
    from = Math.min(Math.max(start, 0), end - length);
    to = from + length;
    draw();
  }
  // `at` is where to zoom, from 0 at the left to 1 at the right.
  const zoom = (factor, at = 0.5) => view(from + (to - from) * (1 - factor) * at, (to - from) * factor);
  const pan = (share) => view(from + (to - from) * share, to - from);
  const place = (event) => {
    const r = picture.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - r.left - LEFT) / (r.width - LEFT - 10), 0), 1);
  };

  function show() {
    spans = JSON.parse(document.getElementById(pick.value).textContent);
    // Longer ones first: what lies within another is drawn on top.
    spans.sort((a, b) => b[4] - a[4]);
    end = Math.max(1, ...spans.map((s) => s[3] + s[4]));
    const record = box.querySelector("a.record"), chosen = pick.selectedOptions[0];
    record.href = chosen.dataset.record;
    view(0, end);
  }

  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => view(0, end), Home: () => view(0, to - from),
    End: () => view(end, to - from), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  };
  picture.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    keys[event.key]();
    event.preventDefault();
  });
  picture.addEventListener("wheel", (event) => {
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
    event.preventDefault();
  }, { passive: false });
  let held = null;
  picture.addEventListener("pointerdown", (event) => {
    held = { at: place(event), from };
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (held) view(held.from + (held.at - place(event)) * (to - from), to - from);
  });
  for (const name of ["pointerup", "pointercancel"]) picture.addEventListener(name, () => { held = null; });
  for (const [name, act] of [["in", () => zoom(0.5)], ["out", () => zoom(2)], ["all", () => view(0, end)]])
    box.querySelector(`button.${name}`).addEventListener("click", act);
  pick.addEventListener("change", show);
  window.addEventListener("resize", draw);
  show();
}

const box = document.getElementById("timeline");
if (box) timeline(box);

// Hundreds of pictures take seconds to decode: each is, when it comes near, or all to be printed.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) picture(entry.target);
}, { rootMargin: "600px" });
function picture(image) {
  image.src = image.dataset.src;
  image.removeAttribute("data-src");
  seen.unobserve(image);
}
const pictures = () => document.querySelectorAll("img[data-src]");
pictures().forEach((image) => seen.observe(image));
window.addEventListener("beforeprint", () => pictures().forEach(picture));
