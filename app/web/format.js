// Small helpers: elements, and numbers as people read them.
const root = element.querySelector(".qwm");
const $ = (selector, from = root) => from.querySelector(selector);
const $$ = (selector, from = root) => [...from.querySelectorAll(selector)];
const out = (name) => $('[data-out="' + name + '"]');
const input = (name) => $('[data-in="' + name + '"]');

function say(name, text) {
  const node = out(name);
  if (node.textContent !== text) node.textContent = text;
}

function make(tag, properties = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("data-") || name.startsWith("aria-") || name === "role")
      node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function bytes(count) {
  if (count === null || count === undefined) return "\u2013";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toFixed(digits) + "\u00a0" + units[unit];
}

const times = (ratio) => (ratio === null ? "\u2013" : ratio.toFixed(2) + "\u00d7");
const whole = (count) => count.toLocaleString("en-US").replaceAll(",", "\u202f");
const millis = (ms) => {
  if (ms < 1000) return ms.toFixed(ms < 10 ? 1 : 0) + "\u00a0ms";
  return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + "\u00a0s";
};
const decibels = (db) => (db >= 99 ? "identical" : db.toFixed(1) + "\u00a0dB");
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

// Arrow keys walk through a group of tiles; Enter or Space chooses, as on any button.
function rove(holder) {
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.code];
    const tiles = [...holder.children], at = tiles.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    tiles[(at + step + tiles.length) % tiles.length].focus();
  });
}
