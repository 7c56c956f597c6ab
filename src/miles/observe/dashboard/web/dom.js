// Elements from data: every string becomes a text node, never HTML.

const SAFE_LINK = /^(#|\/media\?|data:image\/(png|jpeg|webp|gif);base64,)/;
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    setProperty(element, name, value);
  }
  append(element, children);
  return element;
}

function setProperty(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function") {
    element.addEventListener(name.replace(/^on/, ""), value);
  } else if (name === "class") {
    element.className = value;
  } else if (name === "value" || name === "checked" || name === "disabled" || name === "selected" || name === "open") {
    element[name] = value;
  } else if (name.startsWith("on") || name === "style" || name === "srcdoc") {
    throw new Error(`${name} cannot be set from data`);
  } else if ((name === "href" || name === "src") && !SAFE_LINK.test(value)) {
    throw new Error(`${value} is not an address of this page`);
  } else {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replaceContent(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Control and direction characters of a model's text, shown by their numbers, so that text is read as it was sampled.
export function visible(text) {
  return text.replace(HIDDEN, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function button(label, onclick, properties) {
  return h("button", { type: "button", onclick, ...properties }, label);
}

export function field(label, control) {
  return h("label", { class: "field" }, h("span", null, label), control);
}

export function select(options, value, onchange, label) {
  const items = options.map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  return h("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) }, items);
}

export function table(head, rows, properties) {
  const titles = head.map((cell) => (cell instanceof Node ? cell : h("th", { scope: "col" }, cell)));
  return h("div", { class: "scroll" }, h("table", properties, h("thead", null, h("tr", null, titles)), h("tbody", null, rows)));
}

export function numberTitle(text) {
  return h("th", { scope: "col", class: "number" }, text);
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
