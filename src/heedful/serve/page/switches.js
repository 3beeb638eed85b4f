// The switches in the head of a page: its language, and its colors.

import { showTexts, switchLanguage, text } from "./texts.js";

const THEMES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const get = (id) => document.getElementById(id);

/** The theme that was chosen; another page of this host may have stored another word. */
function theme() {
  const stored = localStorage.getItem("theme");
  return THEMES.includes(stored) ? stored : "auto";
}

/** Show a page: its texts, its colors, and by `show` all else; again when the language changes. */
export function startPage(show) {
  const showAll = () => {
    showTexts();
    showTheme();
    show();
  };
  get("language").addEventListener("click", () => {
    switchLanguage();
    showAll();
  });
  get("theme").addEventListener("click", () => {
    localStorage.setItem("theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    showTheme();
  });
  dark.addEventListener("change", showTheme);
  showAll();
}

function showTheme() {
  const isDark = theme() === "dark" || (theme() === "auto" && dark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  get("theme").textContent = text({ auto: "themeAuto", light: "themeLight", dark: "themeDark" }[theme()]);
}
