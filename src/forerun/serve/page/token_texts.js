/**
 * What to show for tokens. A token may hold part of a character only, and by itself decodes to "\uFFFD"; the text of
 * the answer knows better. The tokens of such a character stand together: the first shows all of it, the rest nothing.
 */

const PARTIAL = "\uFFFD";

export class TokenTexts {
  constructor() {
    this.at = 0; // how far into the answer's text the tokens have come
  }

  /** What to show for the first of `tokens` and those that belong with it; none: more must come before it is known. */
  next(tokens, text, over) {
    const length = tokens.findIndex((token) => !token.includes(PARTIAL));
    if (length === 0) {
      const found = text.indexOf(tokens[0], this.at);
      if (found >= 0) this.at = found + tokens[0].length;
      return [tokens[0]];
    }
    if (length < 0 && !over) return [];
    const end = length < 0 ? text.length : text.indexOf(tokens[length], this.at + 1);
    const together = tokens.slice(0, length < 0 ? tokens.length : length);
    if (end <= this.at) return together; // not to be found: shown as they are
    const whole = text.slice(this.at, end);
    this.at = end;
    return together.map((_, index) => (index ? "" : whole));
  }
}
