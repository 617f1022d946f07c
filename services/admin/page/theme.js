/** The colours of page.css as values for charts. */

const dark = matchMedia("(prefers-color-scheme: dark)");

/** @returns {Object<string, string>} colours by the variable's name without dashes */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ["ink", "quiet", "line", "card", "blue", "orange", "green", "red", "sky", "purple", "yellow", "grey"].map(
      (name) => [name, value(name)],
    ),
  );
}

/** Colours that are distinct for all kinds of colour vision, with a dash each (Okabe and Ito). */
export function series(palette) {
  const hues = [palette.blue, palette.orange, palette.green, palette.purple, palette.sky, palette.red];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  return (index) => ({
    colour: hues[index % hues.length],
    dash: dashes[Math.floor(index / hues.length) % dashes.length],
  });
}

/** Call a function when the viewer's colour scheme changes. @param {() => void} then */
export function onScheme(then) {
  dark.addEventListener("change", then);
}
