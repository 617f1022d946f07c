/** Builds elements. Texts become text nodes, never HTML, because names of jobs may contain anything. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element.
 * @param {string} tag
 * @param {Object<string, string|number|boolean|null|undefined>} [attributes] false, null and undefined omit the
 *   attribute; true sets it empty
 * @param {...(Node|string|number|null|undefined|Array)} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * Create an SVG element.
 * @param {string} tag
 * @param {Object<string, string|number>} [attributes]
 * @param {...Node} children
 * @returns {SVGElement}
 */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * Copy a template of index.html.
 * @param {string} id
 * @returns {Object<string, HTMLElement>} `root`, and the parts to fill by their names
 */
export function copy(id) {
  const root = document.importNode(document.getElementById(id).content, true).firstElementChild;
  const parts = [...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]);
  return { root, ...Object.fromEntries(parts) };
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * Put children into an element, unless it shows equal data already.
 * @param {Element} element
 * @param {unknown} data data that determine the children
 * @param {() => Array<Node|string>|Node|string} make
 */
export function show(element, data, make) {
  const signature = JSON.stringify(data);
  if (element.shown === signature) return;
  element.shown = signature;
  element.replaceChildren(...[make()].flat(Infinity).filter((child) => child !== null));
}

/**
 * Set a text, unless it is the same.
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
