/** Numbers, money and times in words, in the viewer's number format and time zone. */

export const UNKNOWN = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number|null} value @returns {string} such as 12,034 */
export function count(value) {
  return known(value) ? grouped.format(value) : UNKNOWN;
}

/** A count, with a plus if it is partial. @returns {string} such as 12+ */
export function atLeast(value, whole) {
  return count(value) + (whole || !known(value) ? "" : "+");
}

/** @param {number|null} value @returns {string} three significant digits: 0.351, 12.3k, 4.1M, 3.0e+16 */
export function short(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e12)) return value.toExponential(1);
  for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return significant(value / (suffix === "k" ? 1e3 : unit)) + suffix;
  }
  return size >= 1000 ? grouped.format(value) : significant(value);
}

function significant(value) {
  return String(Number(value.toPrecision(3)));
}

/** @param {number|null} share @returns {string} such as 57.9 % */
export function percent(share, digits = 1) {
  return known(share) ? `${(share * 100).toFixed(digits)} %` : UNKNOWN;
}

/** @param {number|null} usd @returns {string} with as many digits as distinguish two amounts */
export function money(usd) {
  if (!known(usd)) return UNKNOWN;
  const digits = Math.abs(usd) >= 1 || usd === 0 ? 2 : Math.abs(usd) >= 0.01 ? 4 : 6;
  return `$${usd.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: digits })}`;
}

/** @param {number|null} seconds @returns {string} such as 1 h 52 min */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.round(seconds));
  if (seconds < 10 && seconds > 0) return `${significant(seconds)} s`;
  if (whole < 120) return `${whole} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** @param {number|null} seconds @returns {string} the short form: 1h 52m */
export function brief(seconds) {
  return duration(seconds).replaceAll(/ (h|d|s|m)(in)?/g, "$1");
}

const clocks = {
  time: new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" }),
  day: new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }),
};

/**
 * @param {number|null} atS seconds since 1970
 * @returns {string} the time of day, with the date if it is not today
 */
export function clock(atS) {
  if (!known(atS)) return UNKNOWN;
  const at = new Date(atS * 1000);
  const today = at.toDateString() === new Date().toDateString();
  return (today ? clocks.time : clocks.day).format(at);
}

/**
 * The coordinate of a time on a chart's axis, which shows it in the viewer's time zone.
 * @param {number} atS seconds since 1970
 * @returns {number} milliseconds since 1970
 */
export function onAxis(atS) {
  return atS * 1000;
}

/** The name of the viewer's time zone. */
export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
