// The errors of requests, as the page shows them.

import { ServerError } from "./api.js";
import { errorText, text } from "./texts.js";

/** What an error says, in the language of the page. */
export function messageOf(error) {
  if (!(error instanceof ServerError)) return String(error);
  if (error.status === 0) return text("unreachable");
  if (error.status === 401) return text("wrongKey");
  return errorText(error);
}
