// Small helpers: elements by their data names, and making new ones.
export const $ = (selector, from = document) => from.querySelector(selector);
export const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
export const out = (name) => $('[data-out="' + name + '"]');
export const input = (name) => $('[data-in="' + name + '"]');

export function make(tag, properties = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("data-") || name.startsWith("aria-") || name === "role" || name === "scope")
      node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

// One choice of several, as radio buttons. `choices`: [value, label] pairs.
export function segments(name, choices, changed) {
  const holder = input(name);
  for (const [value, label] of choices) {
    const radio = make("input", { type: "radio", name: name, value: value });
    radio.addEventListener("change", () => changed(value));
    holder.append(make("label", {}, [radio, label]));
  }
  return (value) => { $('input[value="' + value + '"]', holder).checked = true; };
}

export function options(select, choices) {
  const before = select.value;
  select.replaceChildren(...choices.map(([value, label]) => make("option", { value: value, textContent: label })));
  if (choices.some(([value]) => value === before)) select.value = before;
}

export const colour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
export const LANE_TITLES = { bf16: "BF16", qvg: "QVG", "qvg-pro": "QVG-Pro", quantwm: "QuantWM", qtc: "QTC",
  kivi: "KIVI", rtn: "RTN", "bf16-floor": "Noise floor" };
// A cache keeps the colour that it has on the driving page; other lanes take theirs by number.
export function paintLanes(lanes) {
  lanes.forEach((lane, n) => {
    if (LANE_TITLES[lane]) document.body.style.setProperty("--lane-" + n, "var(--of-" + lane + ")");
    else document.body.style.removeProperty("--lane-" + n);
  });
}
export const title = (lane) => LANE_TITLES[lane] || lane;
