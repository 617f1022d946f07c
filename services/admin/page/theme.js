/** The colours of page.css as charts need them: values, not variables. */

const dark = matchMedia("(prefers-color-scheme: dark)");

/**
 * @returns {Object<string, string>} by the name of the variable, without its dashes
 */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ["ink", "quiet", "line", "card", "blue", "orange", "green", "red", "sky", "purple", "yellow", "grey"].map(
      (name) => [name, value(name)],
    ),
  );
}

/** Colours that people with any colour vision tell apart, with a dash each (Okabe and Ito). */
export function series(palette) {
  const hues = [palette.blue, palette.orange, palette.green, palette.purple, palette.sky, palette.red];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  return (index) => ({
    colour: hues[index % hues.length],
    dash: dashes[Math.floor(index / hues.length) % dashes.length],
  });
}

/** Call when the viewer's scheme changes. @param {() => void} then */
export function onScheme(then) {
  dark.addEventListener("change", then);
}
